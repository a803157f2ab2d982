"""Which GPUs there are, as the CUDA driver says."""

import ctypes


class Driver:
    """The CUDA driver's count and attributes of devices, which need no context."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)

    def _call(self, function, *arguments):
        status = getattr(self.cuda, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise OSError(f"{function}: {(text.value or b'?').decode()} (CUDA error {status})")

    def _integer(self, function, *arguments):
        result = ctypes.c_int()
        self._call(function, ctypes.byref(result), *arguments)
        return result.value

    def version(self):
        """Newest CUDA that the driver supports, as (major, minor)."""
        return divmod(self._integer("cuDriverGetVersion") // 10, 100)

    def count(self):
        return self._integer("cuDeviceGetCount")

    def attribute(self, number, device):
        return self._integer("cuDeviceGetAttribute", number, device)

    def name(self, device):
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), device)
        return text.value.decode()

    def memory(self, device):
        size = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        return size.value

    def reaches(self, device, peer):
        return bool(self._integer("cuDeviceCanAccessPeer", device, peer))


def n_gpus():
    """CUDA devices that this process sees; 0 without a driver."""
    try:
        return Driver().count()
    except OSError:
        return 0
