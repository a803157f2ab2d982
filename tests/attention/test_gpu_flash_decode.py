"""Flash decode and combining partial attention on GPUs: ``mpirun -n 2 python3 -m pytest -m gpu -k
test_gpu_flash_decode``; 1 and 4 too."""

import gpu
import pytest

import shmemkit as sk

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
LENGTHS = [0, 1, 77, 1024, 5003, 16384]  # of a sequence here; on other ranks in another order
REPLAYS = 20


@pytest.fixture
def world():
    found = gpu.world()
    yield found
    torch.cuda.synchronize()
    found.host_barrier()


def random(seed, *shape, dtype=torch.float16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)


def attention(q, k, v, length):
    """-> out, lse, of one sequence, in float32"""
    kv_heads = k.shape[1]
    q = q.float().reshape(kv_heads, -1, q.shape[-1])
    scores = torch.einsum("hgd,thd->hgt", q, k[:length].float()) / q.shape[-1] ** 0.5
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("hgt,thd->hgd", torch.softmax(scores, -1), v[:length].float())
    return out.reshape(-1, q.shape[-1]), lse.reshape(-1)


def combined(world, outs, lses):
    """By all ranks' partial results, over the host."""
    of_all = world.host_allgather((outs.cpu(), lses.cpu()))
    outs, lses = (torch.stack(part) for part in zip(*of_all, strict=True))
    weights = torch.softmax(lses, 0).nan_to_num()
    return (outs.nan_to_num() * weights[..., None]).sum(0).cuda()


def lengths_of(world):
    r = world.rank % len(LENGTHS)
    return LENGTHS[r:] + LENGTHS[:r]


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype"),
    [
        (12, 1, 128, torch.float16),
        (2, 4, 64, torch.bfloat16),
        (8, 8, 128, torch.bfloat16),
        (1, 16, 128, torch.float16),
    ],
)
def test_as_in_float32(world, kv_heads, group, head_dim, dtype, page_size):
    """In a graph, too, whose lengths change."""
    lengths, n, heads = lengths_of(world), len(LENGTHS), kv_heads * group
    room = max(LENGTHS)
    k, v = (random(10 * world.rank + i, n, room, kv_heads, head_dim, dtype=dtype) for i in (1, 2))
    q, table, paged = random(0, n, heads, head_dim, dtype=dtype), None, (k, v)
    if page_size:
        pages = -(-room // page_size)
        order = torch.randperm(n * pages, device="cuda")
        table = torch.argsort(order).reshape(n, pages).int()
        paged = [x.reshape(n * pages, page_size, kv_heads, head_dim)[order].contiguous() for x in (k, v)]
    op = sk.FlashDecode(world, n, heads, kv_heads, head_dim, str(dtype).removeprefix("torch."))
    on_gpu = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def check(out, lengths):
        parts = [attention(q[b], k[b], v[b], lengths[b]) for b in range(n)]
        wanted = combined(world, *(torch.stack(x) for x in zip(*parts, strict=True)))
        error = (out.float() - wanted).norm() / wanted.norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3), error

    check(op(q, *paged, on_gpu, table), lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(q, *paged, on_gpu, table)
    for turn in range(3):
        on_gpu.copy_(torch.tensor(lengths[turn:] + lengths[:turn], dtype=torch.int32))
        for _ in range(REPLAYS):
            graph.replay()
        check(out, lengths[turn:] + lengths[:turn])
    torch.cuda.synchronize()
    op.free()


@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combining(world, form, dtype):
    n, rank, batch, head_dim = world.n_ranks, world.rank, 33, 128
    heads = 4 * n
    op = sk.AttentionCombine(world, batch, heads, head_dim, str(dtype).removeprefix("torch."), form)
    mine = slice(None) if form == "all_gather" else slice(4 * rank, 4 * rank + 4)
    for turn in range(REPLAYS):
        size = batch - turn
        x, lse = (
            random(100 * turn + rank, size, heads, head_dim, dtype=dtype),
            random(turn, size, heads).float(),
        )
        lse = lse * (rank + 1)
        if n > 1:
            x[rank % size], lse[rank % size] = float("nan"), -float("inf")
        out, wanted = op(x, lse), combined(world, x.float(), lse)[:, mine]
        assert torch.allclose(
            out.float(), wanted, *((1e-5, 1e-5) if dtype == torch.float32 else (8e-3, 8e-3))
        )
    op.free()
