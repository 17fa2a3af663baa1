"""The shared-memory backend without an engine: bytes, bounds, lifetimes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openrlhf_like import vllm_plugin
from openrlhf_like.cluster.transfer.check import compare_checksums, tensor_checksum

pytest.importorskip("vllm")


class Reader:
    """The engines' end of the protocol: copies what the segment holds whenever it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.chunk_bytes: list[int] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        from openrlhf_like.cluster.transfer.shm import _map_segment

        self.name, self.size = info["segment"], info["size"]
        self.map = _map_segment(info["segment"], info["size"])

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        from openrlhf_like.cluster.transfer.shm import _read

        self.calls.append("update")
        fields = zip(info["names"], info["dtype_names"], info["shapes"], info["offsets"], strict=True)
        tensors = {n: _read(self.map, getattr(torch, d), s, o) for n, d, s, o in fields}
        self.chunk_bytes.append(sum(t.nbytes for t in tensors.values()))
        self.tensors.update(tensors)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


class Gather:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names_and_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self) -> Any:
        return iter(self.tensors.items())


def transfer(tensors: dict[str, torch.Tensor], segment_bytes: int, rank: int = 0) -> tuple[Any, Reader]:
    vllm_plugin.register()
    vllm_plugin.register()  # idempotent, though the factories refuse a name twice
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from openrlhf_like.cluster.transfer.shm import ShmTrainerInitInfo
    from openrlhf_like.cluster.transfer.source import CallbackSource

    reader = Reader()
    engine = WeightTransferTrainerFactory.trainer_init(
        ShmTrainerInitInfo(rank=rank, segment_bytes=segment_bytes),
        client=reader,
        source=CallbackSource(Gather(tensors)),
    )
    return engine, reader


def some_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(7, 13, generator=g),
        "half": torch.randn(33, generator=g).bfloat16(),
        "turned": torch.randn(8, 5, generator=g).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "large": torch.randn(500, generator=g),
        "last": torch.arange(9, dtype=torch.int64),
    }


def test_every_byte_arrives_in_bounded_chunks() -> None:
    tensors = some_tensors()
    engine, reader = transfer(tensors, segment_bytes=2048)
    try:
        for _ in range(2):
            reader.calls.clear()
            engine.send_weights()
            assert reader.calls[0] == "start" and reader.calls[-1] == "finish" and reader.calls.count("update") > 1
            assert set(reader.tensors) == set(tensors)
            for name, tensor in tensors.items():
                got = reader.tensors[name]
                assert got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor), name
            assert max(reader.chunk_bytes) <= reader.size
            tensors["odd"].mul_(2)
    finally:
        engine.shutdown()


def test_a_tensor_larger_than_the_segment_enlarges_it() -> None:
    engine, reader = transfer({"big": torch.arange(5000.0)}, segment_bytes=64)
    try:
        engine.send_weights()
        assert torch.equal(reader.tensors["big"], torch.arange(5000.0))
    finally:
        engine.shutdown()


def test_the_segment_has_no_name_left_once_the_engines_have_mapped_it() -> None:
    # A process that is killed can then leave nothing behind in /dev/shm.
    engine, reader = transfer({"a": torch.ones(4)}, segment_bytes=4096)
    from openrlhf_like.cluster.transfer.shm import _map_segment

    with pytest.raises(RuntimeError, match="--vllm.sync_backend shm needs trainer rank 0 and every engine on one"):
        _map_segment(reader.name, reader.size)
    engine.send_weights()
    assert torch.equal(reader.tensors["a"], torch.ones(4))
    engine.shutdown()
    engine.shutdown()


def test_other_ranks_take_part_in_gathering_and_send_nothing() -> None:
    engine, reader = transfer(some_tensors(), segment_bytes=2048, rank=1)
    engine.send_weights()
    assert reader.calls == []


def test_a_source_that_gathers_other_than_declared_is_an_error() -> None:
    from openrlhf_like.cluster.transfer.source import CallbackSource

    gather = Gather({"a": torch.ones(2), "b": torch.ones(3)})
    source = CallbackSource(gather)
    source.metadata()
    gather.tensors = {"a": torch.ones(2)}
    with pytest.raises(RuntimeError, match="declared b and did not gather it"):
        list(source)
    gather.tensors = {"a": torch.ones(2), "c": torch.ones(3)}
    with pytest.raises(RuntimeError, match="gathered c"):
        list(source)


def test_the_source_converts_to_the_declared_type() -> None:
    from openrlhf_like.cluster.transfer.source import CallbackSource

    class Half(Gather):
        def names_and_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
            return [("a", torch.bfloat16, (2,))]

    ((_, tensor),) = list(CallbackSource(Half({"a": torch.ones(2)})))
    assert tensor.dtype == torch.bfloat16


def test_checksum_sees_changes_swaps_shifts_types_and_shapes_but_not_layout() -> None:
    base = torch.randn(100, 40, generator=torch.Generator().manual_seed(1))
    changed, swapped = base.clone(), base.clone()
    changed[50, 3] = torch.nextafter(changed[50, 3], torch.tensor(9.0))
    swapped[[0, 1]] = swapped[[1, 0]]
    others = [changed, swapped, base.roll(1), base.view(torch.int32), base.view(40, 100), base.bfloat16()]
    assert len({tensor_checksum(t) for t in [base, *others]}) == 1 + len(others)
    assert tensor_checksum(base.t().contiguous().t()) == tensor_checksum(base)
    padded = torch.cat([torch.zeros(1, dtype=torch.bfloat16), base.bfloat16().view(-1)])
    assert tensor_checksum(padded[1:].view(100, 40)) == tensor_checksum(base.bfloat16())
    assert tensor_checksum(torch.empty(0)) == tensor_checksum(torch.empty(0))


def test_checksum_is_the_same_over_chunk_borders() -> None:
    large = torch.arange(3_000_000, dtype=torch.int32)
    moved = large.clone()
    moved[[5, 2_500_000]] = moved[[2_500_000, 5]]
    assert tensor_checksum(large) == tensor_checksum(large.clone()) != tensor_checksum(moved)


def test_differences_are_named() -> None:
    compare_checksums({"a": 1}, {"a": 1}, "engine 0")
    with pytest.raises(RuntimeError, match=r"engine 3: 1 differ \(b\); 1 did not arrive \(c\); 1 arrived unsent \(d\)"):
        compare_checksums({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}, "engine 3")
