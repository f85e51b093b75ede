"""The devices and links there are, and the logical meshes that fit them."""
