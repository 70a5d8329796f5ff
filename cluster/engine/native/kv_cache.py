"""KV blocks as the native kernels pack them."""

from __future__ import annotations

from torch import Tensor

from cluster.engine.kv_cache import KVCache
from cluster.engine.native import kv_packing
from cluster.errors import ConfigError
from cluster.kv_layout import KVLayout


class NativeKVCache(KVCache):
    """The packing "vnni"; see `kv_packing`."""

    def __init__(self, layout: KVLayout, storage: Tensor) -> None:
        """See `KVCache`.

        Raises:
            ConfigError: a layout that the native kernels do not know.
        """
        super().__init__(layout, storage)
        try:
            kv_packing.check_layout(layout)
        except ValueError as error:
            raise ConfigError(str(error), param=str(error).partition(":")[0]) from error

    def zero_tail(self, block_id: int, from_token: int) -> None:
        kv_packing.zero_tail(self.layout, self.storage[block_id], from_token)
