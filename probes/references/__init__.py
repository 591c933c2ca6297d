"""Which object refers to which, and by what name: also where the collector is shown nothing.

`edges` names a reference as code, with a rule for each kind of holder in `definitions`, `instances` and `entries`;
`unseen_references` lists what the collector is not shown; `native_references`, `cxx_holders` and `interpreter_holders`
find what C, C++ and the interpreter hold.
"""
