# SPDX-License-Identifier: Apache-2.0
"""As much of PyTorch's interface as tests/hardware/programs uses, so that they run where there is none."""

import os

import driver

__version__ = "stand-in"
uint8 = "uint8"


class version:
    cuda = "stand-in"


def empty(size, dtype=None, device=None):
    try:
        return driver.Block(size, pooled="cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    except driver.OutOfMemory as error:
        raise cuda.OutOfMemoryError("CUDA out of memory. " + str(error)) from None


class _Value:
    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


class _Tensor:
    """Of one value, which is what the kernels of a simulated GPU cannot compute."""

    def __init__(self, count, value):
        self.block, self.count, self.value = driver.Block(count * 4), count, value

    def __matmul__(self, other):
        return _Tensor(self.count, self.value * other.value)

    def sum(self):
        return _Value(self.count * self.value)


def full(shape, value, device=None):
    return _Tensor(shape[0] * shape[1], value)


def eye(n, device=None):
    return _Tensor(n * n, 1.0)


def ones(n, device=None):
    return _Tensor(n, 1.0)


class _Nothing:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def wait_stream(self, _):
        pass

    def replay(self):
        pass


class cuda:
    class OutOfMemoryError(RuntimeError):
        pass

    Stream = CUDAGraph = stream = graph = _Nothing

    class nccl:
        @staticmethod
        def version():
            return (0, 0, 0)

    @staticmethod
    def is_available():
        try:
            driver.start()
        except (OSError, driver.Failed):
            return False
        return True

    @staticmethod
    def get_allocator_backend():
        return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "native")

    @staticmethod
    def mem_get_info():
        return driver.info()

    @staticmethod
    def empty_cache():
        pass

    @staticmethod
    def synchronize():
        driver.synchronize()

    @staticmethod
    def current_stream():
        return _Nothing()

    @staticmethod
    def memory_reserved():
        return 0


class distributed:
    @staticmethod
    def is_nccl_available():
        return True

    @staticmethod
    def init_process_group(*_, **__):
        pass

    @staticmethod
    def all_reduce(tensor):
        tensor.lump = driver.Block(64 << 20)

    @staticmethod
    def destroy_process_group():
        pass
