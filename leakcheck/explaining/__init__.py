"""Who retains an object: a path is read as verdict, cause, holder and suspects, and as code that cuts it.

`explain` is the entry; `inspectors`, `library_objects` and `path_names` judge the objects on a path; `cuts` and
`expressions` write the one change that lets go.
"""
