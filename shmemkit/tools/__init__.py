"""Commands that need no World: ``shmemkit run`` and ``shmemkit doctor``."""
