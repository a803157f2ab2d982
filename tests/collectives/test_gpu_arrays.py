"""PyTorch tensors, and arrays of other libraries, on GPUs, on PyTorch's streams and in its graphs:
``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_arrays``, 1 and 2 too."""

import gpu
import numpy as np
import pytest

import shmemkit as sk

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
SIZE = 1 << 18  # elements of each rank, a multiple of the ranks up to 8
CALLS = 20
LATE = 2_000_000  # clocks, a millisecond


@pytest.fixture
def world():
    found = gpu.world()
    yield found
    torch.cuda.synchronize()
    found.host_barrier()


def expected(name, x_of, world):
    """What `name` gives here, of x_of(rank), all of whose elements are one number."""
    n, me = world.n_ranks, world.rank
    of_all = [x_of(r) for r in range(n)]
    return {
        "all_gather": torch.tensor(of_all, device="cuda")[:, None],
        "all_reduce": sum(of_all),
        "reduce_scatter": sum(of_all),
        "all_to_all": torch.tensor(of_all, device="cuda").repeat_interleave(SIZE // n),
        "broadcast": of_all[0],
        "gather": torch.tensor(of_all, device="cuda")[:, None] if me == 0 else None,
    }[name]


names = pytest.mark.parametrize(
    "name", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "gather"]
)


def new(dtype=torch.int32, size=SIZE):
    return torch.zeros(size, dtype=dtype, device="cuda")


@names
@pytest.mark.parametrize("side", [False, True], ids=["current", "side"])
def test_in_order_with_pytorchs_work(world, name, side):
    """x is late; what is made of the result, and x, which is written again, come after the call."""
    call, x, results = getattr(sk, name), new(), []
    call(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for i in range(CALLS):
            torch.cuda._sleep(LATE)
            x.fill_(100 * i + world.rank)
            result = call(x)
            results.append(None if result is None else result * 2)
            x.fill_(-1)
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        wanted = expected(name, lambda r: 100 * i + r, world)  # noqa: B023
        assert wanted is None if result is None else (result == 2 * wanted).all()


@names
def test_in_a_graph_of_pytorchs(world, name):
    """Also calls whose arrays are the graph's own, and so bound in the capture."""
    call, x, graph = getattr(sk, name), new(), torch.cuda.CUDAGraph()
    call(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        first = call(x + 1)
        second = call(x + 2)
        results = [None if result is None else result * 2 for result in (first, second)]
    for i in range(CALLS):
        torch.cuda._sleep(LATE * (world.rank == i % world.n_ranks))
        x.fill_(100 * i + world.rank)
        graph.replay()
        copies = [None if result is None else result.clone() for result in results]
        for more, result in enumerate(copies, 1):
            wanted = expected(name, lambda r: 100 * i + r + more, world)  # noqa: B023
            assert wanted is None if result is None else (result == 2 * wanted).all()


def test_the_first_call_is_refused_in_a_graph(world):
    x, graph = new(torch.int64, 3 << 18), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"all_reduce\(\): the stream captures a graph"):
        with torch.cuda.graph(graph):
            sk.all_reduce(x, "min")


def test_tensors_and_cupys_arrays_in_turn(world):
    """On PyTorch's stream and on the World's, which only the order of calls orders."""
    n, reduce = world.n_ranks, sk.AllReduce(world, 4 * SIZE)
    x, y = new(), world.xp.zeros(SIZE, "int32")
    tensors, arrays = [], []
    for i in range(CALLS):
        torch.cuda._sleep(LATE * (i % 3 == 0))
        x.fill_(i + world.rank)
        y.fill(i - world.rank)
        tensors.append(reduce(x))
        arrays.append(reduce(y))
    torch.cuda.synchronize()
    of_ranks = sum(range(n))
    for i, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        assert isinstance(tensor, torch.Tensor) and isinstance(array, world.xp.ndarray)
        assert (tensor == n * i + of_ranks).all() and (array == n * i - of_ranks).all()
    reduce.free()


def test_streams_that_are_given(world):
    """PyTorch's and CuPy's; the result may be used there."""
    n = world.n_ranks
    x = new().fill_(world.rank)
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), world.xp.cuda.Stream(non_blocking=True), world.stream):
        out = sk.all_reduce(x, stream=stream)
        copy = world.asnumpy(out, stream=stream)
        assert (copy == sum(range(n))).all()


@pytest.mark.parametrize("dtype", "bool uint8 int64 float16 bfloat16 float32 complex64 float8_e4m3fn".split())
def test_dtypes(world, dtype):
    kind = getattr(torch, dtype)
    x = (torch.arange(1024, device="cuda") % (world.rank + 2)).to(kind)
    gathered, parts = sk.all_gather(x), sk.all_to_all(x[: 8 * world.n_ranks])
    assert gathered.dtype == parts.dtype == kind
    for r in range(world.n_ranks):
        theirs = (torch.arange(1024, device="cuda") % (r + 2)).to(kind)
        assert torch.equal(gathered[r].view(torch.uint8), theirs.view(torch.uint8))
    if dtype not in ("bool", "complex64", "float8_e4m3fn"):
        total = sk.all_reduce(x)
        assert total.dtype == kind
        wanted = sum(torch.arange(1024, device="cuda") % (r + 2) for r in range(world.n_ranks))
        assert torch.equal(total, wanted.to(kind))


def test_symmetric_memory(world):
    n, room = world.n_ranks, sk.zeros((world.n_ranks, SIZE), "int32")
    view = torch.from_dlpack(room)
    assert world.is_symmetric(view) and world.is_symmetric(view[-1]) and not world.is_symmetric(new())
    gather = sk.AllGather(world, room.nbytes)
    assert gather(new().fill_(world.rank), view) is view
    assert view[:, 5].tolist() == list(range(n))
    copy = sk.array(new(torch.bfloat16).fill_(3))
    assert copy.dtype.name == "bfloat16" and (world.asnumpy(copy).astype("float32") == 3).all()
    gather.free()
    torch.cuda.synchronize()
    world.host_barrier()
    sk.free(copy)
    sk.free(room)


class ByDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class ByInterface:
    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


@pytest.mark.parametrize("kind", [ByDlpack, ByInterface])
def test_other_libraries(world, kind):
    x, out = world.xp.full(SIZE, world.rank, "int32"), world.xp.zeros(SIZE, "int32")
    given = kind(out)
    assert sk.all_reduce(kind(x), out=given) is given
    assert isinstance(result := sk.all_reduce(kind(x)), world.xp.ndarray)
    for array in (out, result):
        assert (world.asnumpy(array) == sum(range(world.n_ranks))).all()


def test_experts_and_products(world):
    """On a side stream, without a wait of the host."""
    n, me = world.n_ranks, world.rank
    ep = sk.ExpertParallel(world, 64, 512, n, 1)
    product = sk.GemmReduceScatter(world, 128 * n, 256)
    with torch.cuda.stream(torch.cuda.Stream()):
        x, weight = (
            torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 512), (512, 256))
        )
        experts = torch.full((64, 1), (me + 1) % n, device="cuda")
        torch.cuda._sleep(LATE)
        x.fill_(me + 1)
        weight.fill_(1)
        received = ep.dispatch(x, experts)
        assert received.rows.dtype == torch.bfloat16 and received is ep.dispatch(x, experts)
        received.rows.mul_(2)
        out = ep.combine(received.rows)
        a = torch.ones((128 * n, 512), dtype=torch.bfloat16, device="cuda")
        summed, plain = product(a, weight), sk.matmul(x, weight)
        x.fill_(0)
        assert (out == 2 * (me + 1)).all() and int(received.counts[0]) == 64
        assert summed.shape == (128, 256) and (summed == 512 * n).all() and (plain == 512 * (me + 1)).all()
    ep.free()
    product.free()


def test_what_is_refused(world):
    reduce = sk.AllReduce(world, 1024)
    x = new(size=16)
    for wrong, message in [
        (x.cpu(), r"x is a CPU torch.Tensor; it must be on the GPU: x.cuda\(\)"),
        (np.zeros(16, "int32"), r"x is a numpy.ndarray; it must be on the GPU: cupy.asarray\(x\)"),
        (
            [1, 2],
            "x is a list; it must be a CuPy array, a PyTorch CUDA tensor, or another array with __cuda_array",
        ),
    ]:
        with pytest.raises(TypeError, match=f"AllReduce: {message}"):
            reduce(wrong)
    with pytest.raises(TypeError, match="AllReduce: out is a CPU torch.Tensor"):
        reduce(x, x.cpu())
    with pytest.raises(ValueError, match="x is int32 .* with strides .*; it must be C-contiguous"):
        reduce(x[::2])
    reduce.free()


def test_kernels(world):
    from numba import cuda

    @cuda.jit
    def add(x, number):
        x[cuda.threadIdx.x] += number

    x = torch.zeros(32, device="cuda", requires_grad=True)
    step = sk.bind(add, 1, 32, (x, 3))
    step(torch.cuda.current_stream())
    assert x.tolist() == [3.0] * 32
