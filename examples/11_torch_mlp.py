"""A tensor-parallel MLP in PyTorch, forward and backward, beside torch.distributed.

    ./mpi_launch.sh -n 4 examples/11_torch_mlp.py

The MLP is y = relu(x @ w1) @ w2. As in examples 07 and 08, each rank has some rows of x and y, some columns
of w1, and the same rows of w2. Both layers communicate, forward and backward:

    forward    h   = relu(all-gather(x) @ w1)          sk.AllGatherGemm
               y   = reduce-scatter(h @ w2)            sk.GemmReduceScatter
    backward   dh  = all-gather(dy) @ w2.T * (h > 0)   sk.AllGatherGemm
               dx  = reduce-scatter(dh @ w1.T)         sk.GemmReduceScatter
               dw1 = all-gather(x).T @ dh
               dw2 = h.T @ all-gather(dy)

The derivative of an all-gather is a reduce-scatter, and that of a reduce-scatter is an all-gather. So the
backward pass uses the same two objects as the forward pass. The gradients of the weights need the gathered
rows, which sk.AllGatherGemm hands out (`gathered`), and no communication.

``MLP`` below is an ordinary torch.autograd.Function. The example runs it twice: with the products of
shmemkit, and with those of PyTorch and the collectives of torch.distributed (NCCL, on CPUs gloo). It compares
the result and the three gradients with those of the whole MLP, computed by one rank in float32. It needs
PyTorch: pip install torch. On the emulator it prints

    4 ranks (emulator): 16 tokens, 16 hidden, 32 inside, bfloat16
    shmemkit: passed
    torch.distributed: passed

On GPUs it also prints how long forward and backward take. PyTorch's autograd needs a process for each rank,
as mpi_launch.sh starts them; `python -m shmemkit.emu` runs all ranks in one process.
"""

import argparse
import os
import socket

import shmemkit as sk

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch ({error}): pip install torch") from None


class MLP(torch.autograd.Function):
    """y = MLP.apply(x, w1, w2, products): this rank's rows of relu(x @ w1) @ w2."""

    @staticmethod
    def forward(ctx, x, w1, w2, products):
        x_of_all, h = products.gather_and_multiply(x, w1)
        h = h.relu()
        ctx.save_for_backward(x_of_all, h, w1, w2)
        ctx.products = products
        return products.multiply_and_scatter(h, w2)

    @staticmethod
    def backward(ctx, dy):
        x_of_all, h, w1, w2 = ctx.saved_tensors
        dy_of_all, dh = ctx.products.gather_and_multiply(dy.contiguous(), w2.T)
        dh = dh * (h > 0)
        dx = ctx.products.multiply_and_scatter(dh, w1.T)
        return dx, x_of_all.T @ dh, h.T @ dy_of_all, None


class Shmemkit:
    """The products of the MLP by shmemkit, which overlaps them with their communication."""

    name = "shmemkit"

    def __init__(self, world, tokens, hidden):
        self.world = world
        self.ag_gemm = sk.AllGatherGemm(world, max_nbytes=2 * tokens * hidden)
        self.gemm_rs = sk.GemmReduceScatter(world, tokens, hidden, "bfloat16")

    def gather_and_multiply(self, x, w):
        """-> (the rows of all ranks, these rows @ w)"""
        of_all = x.new_empty(self.world.n_ranks * x.shape[0], x.shape[1])
        return of_all, self.ag_gemm(x, w, gathered=of_all)

    def multiply_and_scatter(self, h, w):
        """-> this rank's rows of h @ w, added up over the ranks"""
        return self.gemm_rs(h, w)

    def free(self):
        self.ag_gemm.free()
        self.gemm_rs.free()


class Distributed:
    """The same by PyTorch and torch.distributed, one after the other."""

    name = "torch.distributed"
    # PyTorch 2.13 has new names for them.
    all_gather = staticmethod(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
    reduce_scatter = staticmethod(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)

    def __init__(self, world, tokens, hidden):
        with socket.socket() as probe:
            probe.bind(("", 0))
            here = socket.gethostname(), probe.getsockname()[1]
        hosts, ports = zip(*world.host_allgather(here), strict=True)
        host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
        dist.init_process_group(
            "gloo" if world.backend.name == "emulator" else "nccl",
            init_method=f"tcp://{host}:{ports[0]}",
            rank=world.rank,
            world_size=world.n_ranks,
        )
        self.n_ranks = world.n_ranks

    def gather_and_multiply(self, x, w):
        of_all = x.new_empty(self.n_ranks * x.shape[0], x.shape[1])
        self.all_gather(of_all, x)
        return of_all, of_all @ w

    def multiply_and_scatter(self, h, w):
        product = h @ w
        rows = product.new_empty(product.shape[0] // self.n_ranks, product.shape[1])
        self.reduce_scatter(rows, product)
        return rows

    def free(self):
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description="A tensor-parallel MLP, forward and backward.")
    parser.add_argument("--tokens", type=int, help="of each rank (8192 / ranks; 4 on the emulator)")
    parser.add_argument("--hidden", type=int, help="columns of x and y (4096; 16 on the emulator)")
    options = parser.parse_args()

    with sk.init() as world:
        n, me, emulated = world.n_ranks, world.rank, world.backend.name == "emulator"
        if len(set(world.host_allgather((socket.gethostname(), os.getpid())))) < n:
            world.print("PyTorch's autograd needs a process for each rank: use mpi_launch.sh", ranks=0)
            return
        tokens = n * (options.tokens or (4 if emulated else 8192 // n))
        hidden = options.hidden or (16 if emulated else 4096)
        inside = 8 if emulated else 14336 // n // 8 * 8  # columns of a rank between the layers
        device = "cpu"
        if not emulated:
            device = f"cuda:{world.xp.cuda.Device().id}"
            torch.cuda.set_device(device)
        sizes = f"{tokens} tokens, {hidden} hidden, {n * inside} inside, bfloat16"
        world.print(f"{n} ranks ({world.backend.name}): {sizes}", ranks=0)

        def random(seed, *shape):
            generator = torch.Generator(device).manual_seed(seed)
            values = torch.randn(shape, generator=generator, device=device) / shape[0] ** 0.5
            return values.to(torch.bfloat16)

        whole_x, whole_dy = random(0, tokens, hidden), random(1, tokens, hidden)
        columns = [random(2 + rank, hidden, inside) for rank in range(n)]
        rows = [random(2 + n + rank, inside, hidden) for rank in range(n)]
        mine = slice(me * tokens // n, (me + 1) * tokens // n)

        # The whole MLP, by PyTorch's own derivatives. Of its results, this rank's parts.
        x, w1, w2 = (t.float().requires_grad_() for t in (whole_x, torch.cat(columns, 1), torch.cat(rows)))
        y = (x @ w1).relu() @ w2
        y.backward(whole_dy.float())
        inner = slice(me * inside, (me + 1) * inside)
        wanted = {"y": y[mine].detach(), "dx": x.grad[mine], "dw1": w1.grad[:, inner], "dw2": w2.grad[inner]}

        x, w1, w2 = (t.clone().requires_grad_() for t in (whole_x[mine], columns[me], rows[me]))
        dy = whole_dy[mine].clone()
        for kind in (Shmemkit, Distributed):
            products = kind(world, tokens, hidden)

            def step(products=products):
                x.grad = w1.grad = w2.grad = None
                y = MLP.apply(x, w1, w2, products)
                # PyTorch runs a backward pass on a GPU in a thread of its own, unless it is told not to. The
                # calls of shmemkit's objects belong in the thread of the World.
                with torch.autograd.set_multithreading_enabled(False):
                    y.backward(dy)
                return y

            found = {"y": step().detach(), "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad}
            for name, tensor in found.items():
                error = float((tensor.float() - wanted[name]).norm() / wanted[name].norm())
                assert error < 3e-2, f"rank {me}: {products.name}: {name}: relative error {error}"
            took = ""
            if not emulated:
                for _ in range(3):  # later steps get the memory of earlier ones, whose kernels are bound
                    step()
                took = f", {sk.Timer(world).time(step, 1):.1f} us"
            world.print(f"{products.name}: passed{took}", ranks=0)
            products.free()


if __name__ == "__main__":
    main()
