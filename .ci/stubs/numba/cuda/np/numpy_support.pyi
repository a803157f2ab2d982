from typing import Any

from_dtype: Any
