"""From a request to the best plan found, and what is proven of it."""
