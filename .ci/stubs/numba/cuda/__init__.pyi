from typing import Any

bf16: Any
cgutils: Any
fp16: Any
types: Any

def __getattr__(name: str) -> Any: ...
