"""How a process finds its role for a target that is split over several, and what cannot be split."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.loading.sizes import check_divides
from forerun.models.sharded import is_sharded
from forerun.parallel.coordinator import Coordinator
from forerun.parallel.link import Link
from forerun.parallel.worker import Worker

_group: Coordinator | Worker | None = None  # one a process: all models are split over the same ranks


def set_group(group: Coordinator | Worker) -> None:
    """For processes that were started to hold one target."""
    global _group  # noqa: PLW0603
    _group = group


def group() -> Coordinator | Worker | None:
    """This process's role, once it has one."""
    return _group


def join(model: Any) -> Coordinator | Worker | None:
    """This process's role for `model`; None where it is whole. The first time, all ranks have to come here."""
    if not is_sharded(model):
        return None
    check_split(model)
    if _group is None:
        link = Link.establish()
        set_group(Coordinator(link, calls_are_shared=True) if dist.get_rank() == 0 else Worker(link))
    assert _group is not None
    _group.compare(model)
    _group.connect(model)
    return _group


def check_split(model: Any) -> None:
    """Refuse what cannot be decoded in step."""
    name = type(model).__name__
    shards = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model, which is not run split; load it whole")
    if (getattr(model, "_tp_size", None) or 1) == 1:
        raise UnsupportedModel(
            f"{name} has weights that are DTensors and were not split by transformers' tensor parallelism but by "
            "fully_shard, distribute_tensor or the like, which is not followed; load it with "
            "distributed_config=DistributedConfig(tp_size=...), or give a whole copy (full_tensor() gathers a weight)"
        )
    if shards[0].device_mesh.size() != dist.get_world_size():
        raise UnsupportedModel(
            f"{name} is split over {shards[0].device_mesh.size()} of {dist.get_world_size()} processes; start as many "
            f"as DistributedConfig(tp_size=...) says, and use no other kind of parallelism"
        )
    check_divides(model.config, dist.get_world_size(), name)
    if shards[0].is_cuda and dist.get_backend(shards[0].device_mesh.get_group()) == "gloo":
        raise UnsupportedModel(
            f"{name} lies on GPUs and its processes talk by gloo, which was seen to end them by a segmentation fault; "
            "let transformers choose NCCL, with a GPU for each process"
        )
    kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in shards})
    if len(kinds) > 1:
        raise UnsupportedModel(f"{name} has shards of {' and '.join(kinds)}; load it with one dtype")


def serve_passes(decoder: Any) -> None:
    """On ranks other than 0: repeat the passes of rank 0 until it ends. For scripts in which rank 0 streams or runs an
    `Engine` or `AsyncEngine`; ranks that all call `generate` need nothing of this kind."""
    group = join(decoder.target)
    if not isinstance(group, Worker):
        raise InvalidArgument("serve_passes is for ranks other than 0 of a target that is split over processes")
    group.serve(until_stop=True)
