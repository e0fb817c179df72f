"""OVQ, online vector-quantised attention: exact within a chunk, to a growing dictionary of means before it.

The four steps, as in `kvm`: `dictionary.assign` chooses every token's centroid, `dictionary.advance` gives
the centroids as every chunk meets them, `chunks.readable` makes them keys and values, and one softmax of
every chunk's queries goes over [centroids | own chunk].
"""
