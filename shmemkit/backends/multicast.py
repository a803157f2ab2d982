"""NVLink multicast (NVLink SHARP, NVLS): whether the environment, the GPU and NVSHMEM offer it."""

import os

from shmemkit.support.agreement import ranks_text


def disabled():
    """What in the environment turns multicast off, as NAME=value, or None."""
    setting = os.environ.get("NVSHMEM_DISABLE_NVLS")
    # NVSHMEM's booleans: set is true, unless it begins so.
    if setting is None or setting[:1].lower() in ("0", "n", "f"):
        return None
    return f"NVSHMEM_DISABLE_NVLS={setting}"


def check_capability(capability):
    """ValueError where a GPU of this compute capability has no multicast."""
    if capability < (9, 0):
        raise ValueError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}; NVLink multicast needs 9.0 or "
            "newer"
        )


def address(bindings, device, ranks, symmetric, team=None):
    """-> the multicast address of the address `symmetric` in this rank's symmetric heap.

    bindings   nvshmem.bindings
    device     the number of this rank's GPU
    ranks      those whose memory it must stand for, of the World
    team       NVSHMEM's team of these; None: that of the node

    ValueError, with the reason, where there is none. Nothing is created for it: NVSHMEM did so when it began,
    and is asked only where the environment, the GPU and its links allow multicast.
    """
    from cuda.bindings import driver

    if off := disabled():
        raise ValueError(f"{off} turns NVLink multicast off")
    _, handle = driver.cuDeviceGet(device)

    def attribute(name):
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        error, value = driver.cuDeviceGetAttribute(which, handle)
        return 0 if int(error) else value

    check_capability((attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")))
    if not attribute("MULTICAST_SUPPORTED"):
        raise ValueError("the GPU or its driver has no multicast; that needs NVLink through an NVSwitch")
    world = bindings.Team_id.TEAM_WORLD
    team = bindings.Team_id.TEAM_NODE if team is None else team
    members = [bindings.team_translate_pe(team, i, world) for i in range(bindings.team_n_pes(team))]
    if members != list(ranks):
        raise ValueError(
            f"NVSHMEM's multicast reaches {ranks_text(members)} of the host, but the node is declared as "
            f"{ranks_text(ranks)}, by SHMEMKIT_LOCAL_SIZE or local_size. Leave them unset"
        )
    found = bindings.mc_ptr(team, symmetric)
    if not found:
        raise ValueError(
            "NVSHMEM has no multicast address for the array (nvshmemx_mc_ptr is null). Set "
            "NVSHMEM_DEBUG=INFO and NVSHMEM_DEBUG_SUBSYS=ALL to see why when it starts"
        )
    return found
