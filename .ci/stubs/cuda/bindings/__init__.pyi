from typing import Any

driver: Any
nvjitlink: Any
