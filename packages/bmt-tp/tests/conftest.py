import importlib.util

collect_ignore = [] if importlib.util.find_spec("bmt_zero") else ["test_sharded.py", "test_with_zero.py"]
