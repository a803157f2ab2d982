"""What a GPU has by itself, on one rank: matrix products, copies, clusters, mbarriers, registers."""
