"""Training on several devices of one process: ``DataParallel``."""

from .module import DataParallel, MisplacedModuleError, data_parallel

__all__ = ["DataParallel", "MisplacedModuleError", "data_parallel"]
