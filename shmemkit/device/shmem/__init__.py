"""What reaches other ranks: puts and gets, atomics, signals, barriers, loads and stores with an ordering."""
