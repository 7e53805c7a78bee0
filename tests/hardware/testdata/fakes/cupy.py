# SPDX-License-Identifier: Apache-2.0
"""As much of CuPy's interface as tests/hardware/programs uses."""

import driver

__version__ = "stand-in"


class _Pool:
    pooled = False

    def malloc(self, size):
        try:
            return driver.Block(size, self.pooled)
        except driver.OutOfMemory as error:
            raise cuda.memory.OutOfMemoryError("Out of memory: " + str(error)) from None

    def free_all_blocks(self):
        pass


class _AsyncPool(_Pool):
    pooled = True


class cuda:
    MemoryPool, MemoryAsyncPool = _Pool, _AsyncPool
    allocator = _Pool().malloc

    class memory:
        class OutOfMemoryError(MemoryError):
            pass

    class runtime:
        @staticmethod
        def getDeviceCount():
            driver.start()
            return 1

        @staticmethod
        def runtimeGetVersion():
            return 0

        @staticmethod
        def memGetInfo():
            return driver.info()

        @staticmethod
        def deviceSynchronize():
            driver.synchronize()

    @staticmethod
    def set_allocator(allocator):
        cuda.allocator = allocator

    @staticmethod
    def alloc(size):
        return cuda.allocator(size)
