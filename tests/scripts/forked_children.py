"""Children that are forked after sk.init(): each way of use and of end."""

import multiprocessing
import os
import sys

from numba import cuda

import shmemkit as sk


@cuda.jit
def put_one(x):
    x[0] = 1


def square(n):
    return n * n


def use(of):
    try:
        of()
    except RuntimeError as error:
        assert "forked from rank" in str(error), error
    else:
        raise AssertionError(f"{of} raised nothing")


def children(world):
    x = sk.zeros(64)
    group = world.split(0)
    out = sk.AllReduce(world, 256)
    bound = sk.bind(put_one, 1, 1, (x,))
    calls = [
        lambda: sk.init(),
        lambda: sk.current(),
        lambda: sk.zeros(3),
        lambda: sk.all_reduce(x),
        lambda: world.barrier(),
        lambda: world.host_barrier(),
        lambda: world.rank,
        lambda: world.finalize(),
        lambda: out(x),
        lambda: bound(),
        lambda: group.host_barrier(),
        lambda: group.finalize(),
        lambda: world.asnumpy(x),
        lambda: sk.bind(put_one, 1, 1, (x,)),
        lambda: out.free(),
    ]
    if world.backend.name == "emulator":
        calls.append(lambda: put_one[1, 1](x))
    pool = multiprocessing.get_context("fork").Pool(2)
    assert pool.map(square, range(9)) == [n * n for n in range(9)]
    pool.close()
    pool.join()
    for end in ("exit", "status", "raise", "system", "return", "_exit", "use"):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            if end == "use":
                for of in calls:
                    use(of)
                print(world, group)
                os._exit(0)
            if end == "exit":
                sys.exit()
            if end == "status":
                sys.exit(3)
            if end == "raise":
                raise ValueError("of the child")
            if end == "system":
                world.host_barrier()
            if end == "_exit":
                os._exit(5)
            return None
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        wanted = {"status": 3, "raise": 1, "system": 1, "_exit": 5}.get(end, 0)
        assert status == wanted, (end, status)
    y = sk.all_reduce(x + 1)
    assert (world.asnumpy(y) == world.n_ranks).all()
    bound()
    group.host_barrier()
    return x


if __name__ == "__main__":
    if sys.argv[1:] == ["with"]:
        with sk.init() as world:
            if children(world) is not None:
                print("rank ok")
    else:
        world = sk.init()
        if children(world) is not None:
            print("rank ok")
