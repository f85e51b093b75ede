"""Loss and gradients through pipeline stages, one file for each schedule."""
