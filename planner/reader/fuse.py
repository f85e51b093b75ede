def fuse(draft): pass
