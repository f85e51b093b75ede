def rebatch(draft, bound): raise NotImplementedError
