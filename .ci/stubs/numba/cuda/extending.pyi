from typing import Any

intrinsic: Any
overload: Any
register_jitable: Any
