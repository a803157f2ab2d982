"""Operations on all ranks, a folder each: host objects and their methods; beside them what several share."""
