"""All private and undocumented names of other packages, and nothing else.

Some operations of resilin have no public interface: queueing work after a backward pass, resetting
DDP, resuming a framework's loop in the middle of an epoch. Such a name may disappear with any
release. So each is declared here, with the versions it was seen in and its use, and the rest of
resilin calls the plain function that is defined here. A name that is gone is reported in one
sentence that has the name, the installed version and the tested ones. `tests/test_compat.py` checks
that no other module uses a private name of another package.

One module per package: `torch_names`, `torch_fsdp` (FSDP2, loaded with a sharded model),
`torch_agent` (torchrun's agent, loaded by the command line alone), `ray_names`, `accelerate_names`,
`transformers_names`, `lightning_names`, `keras_names` and `python_names`. Each is loaded with the
package it is about; none of them imports the rest of resilin.
"""
