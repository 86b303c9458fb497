"""What the tests of `nondet.kernels.all_reduce` ask ranks to do that takes their process groups apart."""

from __future__ import annotations

import torch
import torch.distributed as dist


def agreements_of_another_group(path: str) -> list[str]:
    """Groups of two among the ranks, destroyed and made anew under the old names: the member that sums in each.

    The second group of a name has a rank that was in the first and one that was not, and its sums are of two parts.
    """
    from nondet.kernels.all_reduce.chain import all_reduce

    rank, world, names = dist.get_rank(), dist.get_world_size(), []
    ran: list[str] = []
    for number, pairs in enumerate((((0, 1), (2, 3)), ((1, 2), (3, 0)))):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}-{number}", world), rank=rank, world_size=world)
        for pair in pairs:
            group = dist.new_group(list(pair))
            if rank in pair:
                names.append(group.group_name)
                x = torch.tensor([2.0**rank])
                ran.append(all_reduce(x, group))
                if float(x) != sum(2.0**r for r in pair):
                    raise AssertionError(f"{float(x)} over {pair}")
    if set(names) - {"1", "2"}:
        raise AssertionError(f"the names were not given again: {names}")
    return ran
