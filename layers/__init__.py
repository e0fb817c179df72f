"""Token mixers: tensors in, tensors out. Any of them works alone, in any trainer:

    from hybrid.layers.base import Site
    from hybrid.layers.registry import mixer_class

    KVM = mixer_class("kvm")
    layer = KVM(KVM.Options(num_heads=8, head_dim=64, chunk=128), Site(hidden_size=512))
    y, state = layer(x)                   # x [B, T, 512]; state lets the next call go on
    y, state = layer(more, None, state)

`base.py` is the contract, `registry.py` finds mixers by kind. Nothing here imports the rest of `hybrid`.
"""
