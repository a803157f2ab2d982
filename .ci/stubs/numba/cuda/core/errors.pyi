from typing import Any

TypingError: Any
