"""The disk tier: values by key in a folder, durable.

disk_tier      the tier; disk_folder, check or remove a folder; disk_errors, the errors of a full or broken disk
disk_index     an SQLite index; disk_schema, its tables; disk_check, its consistency; recent_uses, the order of use
slabs          the files of values; extents, free space; read_buffers, memory to read into; files, the system calls
disk_writer    all changes, in one thread; shared_stores, group commit; folder_lock, one writer a folder
"""
