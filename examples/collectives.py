"""What torch.distributed offers: point to point, collectives, groups, and an all-reduce by hand. Each is checked.

torchrun --nproc-per-node 4 examples/collectives.py
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/collectives.py

With `cluster_ddp.distributed` the process group is there; every function of torch.distributed works in it.
"""

import torch
import torch.distributed as dist

import cluster_ddp


def point_to_point(world: cluster_ddp.World) -> None:
    """Each rank sends its number to the next one, and receives the one of the rank before."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    mine, found = ones(world, world.rank), ones(world, -1)
    if world.rank == 0:  # blocking: if all sent first, all would wait for a receiver
        dist.send(mine, dst=after)
        dist.recv(found, src=before)
    else:
        dist.recv(found, src=before)
        dist.send(mine, dst=after)
    assert found.eq(before).all()
    # Not blocking: they return at once. Don't touch the tensors before wait().
    found = ones(world, -1)
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, found, before)])
    for request in requests:
        request.wait()
    assert found.eq(before).all()


def collectives(world: cluster_ddp.World) -> None:
    """Every rank makes the same calls in the same order."""
    size, rank = world.world_size, world.rank
    tensor = ones(world, rank)
    dist.broadcast(tensor, src=0)
    assert tensor.eq(0).all()
    for operation, expected in (
        (dist.ReduceOp.SUM, size * (size + 1) / 2),
        (dist.ReduceOp.PRODUCT, float(torch.arange(1, size + 1).prod())),
        (dist.ReduceOp.MAX, size),
        (dist.ReduceOp.MIN, 1),
    ):
        tensor = ones(world, rank + 1)
        dist.all_reduce(tensor, op=operation)
        assert tensor.eq(expected).all(), operation
    tensor = ones(world, rank + 1)
    dist.reduce(tensor, dst=0)
    assert rank != 0 or tensor.eq(size * (size + 1) / 2).all()
    parts = [ones(world, -1) for _ in range(size)]
    dist.all_gather(parts, ones(world, rank))
    assert all(part.eq(number).all() for number, part in enumerate(parts))
    dist.gather(ones(world, rank), parts if rank == 0 else None, dst=0)
    tensor = ones(world, -1)
    dist.scatter(tensor, [ones(world, 10 * number) for number in range(size)] if rank == 0 else None, src=0)
    assert tensor.eq(10 * rank).all()


def groups(world: cluster_ddp.World) -> None:
    """The even ranks add up among themselves. All ranks must make the group."""
    even = list(range(0, world.world_size, 2))
    group = dist.new_group(even)
    tensor = ones(world, 1)
    if isinstance(group, dist.ProcessGroup):  # other ranks get a number
        dist.all_reduce(tensor, group=group)
    assert tensor.eq(len(even) if world.rank in even else 1).all()


def ring_all_reduce(world: cluster_ddp.World, tensor: torch.Tensor) -> None:
    """Add up a tensor over all ranks, in place, as gloo and NCCL do: in chunks that go around a ring twice.

    Each rank sends 2 (n - 1) / n of the tensor, however many ranks n there are. First every chunk is added up on its
    way around, so that each rank has one chunk complete. Then the complete chunks go around.
    """
    size, rank = world.world_size, world.rank
    chunks = list(tensor.flatten().tensor_split(size))
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(2 * (size - 1)):
        send, receive = (rank - turn) % size, (rank - turn - 1) % size
        arrived = torch.empty_like(chunks[receive])
        operations = [dist.P2POp(dist.isend, chunks[send], after), dist.P2POp(dist.irecv, arrived, before)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if turn < size - 1:
            chunks[receive] += arrived
        else:
            chunks[receive].copy_(arrived)


def ones(world: cluster_ddp.World, value: float) -> torch.Tensor:
    """Three numbers on this rank's device."""
    return torch.full((3,), float(value), device=world.device)


def main() -> None:
    """Run all of them, and say what was checked."""
    with cluster_ddp.distributed() as world:
        if world.world_size > 1:
            point_to_point(world)
        collectives(world)
        groups(world)
        tensor = torch.arange(10.0, device=world.device) * (world.rank + 1)
        expected = world.all_reduce(tensor)
        ring_all_reduce(world, tensor)
        torch.testing.assert_close(tensor, expected)
        world.print(f"{world.world_size} ranks: all results are right.")


if __name__ == "__main__":
    main()
