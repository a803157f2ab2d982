from typing import Any

normalize_signature: Any
