from __future__ import annotations

import pytest
import torch

from cluster.engine.row_kv_cache import RowKVCache
from cluster.errors import ConfigError
from cluster.kv_layout import KVLayout

NUM_BLOCKS = 5


def make_cache(kv_dtype: str = "bf16") -> RowKVCache:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, kv_dtype=kv_dtype)
    return RowKVCache(layout, torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["bf16", "float32"])
def test_bytes_lie_where_the_layout_says(kv_dtype: str) -> None:
    cache = make_cache(kv_dtype)
    layout = cache.layout
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([2 * 8 + 3, 4 * 8 + 7, 0])  # block 2 token 3, block 4 token 7, block 0 token 0
    kv = torch.randn(layout.num_layers, 3, 2 * layout.num_kv_heads, layout.head_dim, generator=generator)
    for layer in range(layout.num_layers):
        cache.write(layer, cache.write_index(slots), kv[layer])
    expected = torch.zeros_like(cache.storage)
    for layer in range(layout.num_layers):
        for row, slot in enumerate(slots.tolist()):
            for head in range(layout.num_kv_heads):
                for start, values in ((0, kv[layer, row, head]), (layout.kv_stride, kv[layer, row, layout.num_kv_heads + head])):
                    data = values.to(cache.dtype).view(torch.uint8)
                    offset = layer * layout.layer_stride + start + head * layout.head_stride + slot % 8 * len(data)
                    expected[slot // 8, offset : offset + len(data)] = data
    assert torch.equal(cache.storage, expected)


def test_reads_give_what_writes_stored() -> None:
    cache = make_cache()
    layout = cache.layout
    tables = torch.tensor([[3, 1], [0, 4]])
    slots = (tables[:, :, None] * 8 + torch.arange(8)).view(-1)
    kv = torch.randn(32, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.write(1, cache.write_index(slots), kv)
    context = cache.read(1, cache.read_index(tables), 2)
    assert context.shape == (2, 2, layout.num_kv_heads, 16, layout.head_dim) and context.is_contiguous()
    assert torch.equal(context, kv.view(2, 16, 2, 2, 16).permute(2, 0, 3, 1, 4))
    assert torch.equal(cache.layer_keys(1)[3, :, 5], kv[5, :2]) and torch.equal(cache.layer_values(1)[4, 1, 7], kv[31, 3])
    assert not cache.layer_keys(0).any() and not cache.layer_values(2).any()


def test_views_share_the_storage() -> None:
    cache = make_cache()
    cache.layer_values(2)[4, 1] = 1.0
    one = torch.ones(8 * 16, dtype=torch.bfloat16).view(torch.uint8)
    layout = cache.layout
    start = 2 * layout.layer_stride + layout.kv_stride + layout.head_stride
    assert torch.equal(cache.storage[4, start:], one) and not cache.storage[:4].any()


def test_whole_blocks_move() -> None:
    cache = make_cache()
    cache.storage.copy_(torch.randint(0, 256, cache.storage.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    before = cache.storage.clone()
    cache.copy_block(1, 3)
    assert torch.equal(cache.storage[3], before[1])
    saved = cache.read_blocks([4, 0])
    assert torch.equal(saved, before[[4, 0]])
    cache.storage[[0, 4]] = 0
    cache.write_blocks([2, 4], saved)
    assert torch.equal(cache.storage[2], before[4]) and torch.equal(cache.storage[4], before[0]) and not cache.storage[0].any()


def test_zero_tail_leaves_the_tokens_before_it() -> None:
    cache = make_cache()
    for layer in range(3):
        cache.layer_keys(layer).fill_(1.0)
        cache.layer_values(layer).fill_(1.0)
    cache.zero_tail(2, 5)
    for layer in range(3):
        for view in (cache.layer_keys(layer), cache.layer_values(layer)):
            assert view[2, :, :5].all() and not view[2, :, 5:].any() and view[[0, 1, 3, 4]].all()


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(1, 1, 16, 16, "int8"),
        KVLayout(1, 1, 6, 8, "bf16"),  # 96 bytes a head: padded
        KVLayout(1, 1, 16, 16, "bf16", packing="tiles"),
    ],
)
def test_layouts_without_an_implementation_are_refused(layout: KVLayout) -> None:
    with pytest.raises(ConfigError):
        RowKVCache(layout, torch.zeros(1, layout.block_bytes, dtype=torch.uint8))
