from typing import Any

as_dtype: Any
from_dtype: Any
