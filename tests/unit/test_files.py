"""The file seam: replacing a small file, the lock of a spool, the check of its file system, errors in words."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import qflow
from qflow.errors import DiskFull, SpoolInUse, StorageError
from qflow.storage import files as files_module
from qflow.storage import lock as lock_module
from qflow.storage.files import Files, check_filesystem, filesystem_type, make_directories, storage_error, write_all
from qflow.storage.lock import acquire_lock, owner_pid

HOLDER = """
import sys
from qflow.storage.lock import acquire_lock
lock = acquire_lock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """A lock that is taken is refused without pausing between the tries."""
    monkeypatch.setattr("qflow.storage.lock._LOCK_PAUSE_S", 0)


@pytest.fixture
def spool(tmp_path):
    return str(tmp_path)


@pytest.fixture
def other_owner(spool):
    """Another process that owns the spool until the test ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, spool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        yield holder
        holder.kill()


# The lock ------------------------------------------------------------------------------------------------------------


def test_the_owner_is_named_in_the_lock_file(spool):
    """The lock file is private and holds the owner's pid as text, and in which pid namespace that is its number."""
    lock = acquire_lock(spool)
    path = os.path.join(spool, "lock")
    with open(path, "rb") as file:
        assert int(file.read(32)) == os.getpid(), "what earlier versions read"
        assert file.read().decode() == os.readlink("/proc/self/ns/pid") + "\n"
    assert os.stat(path).st_mode & 0o777 == 0o600
    lock.release()


def test_a_second_owner_in_another_process_is_refused(spool, other_owner):
    """A spool that another process owns is refused, naming that process and the spool."""
    with pytest.raises(SpoolInUse) as caught:
        acquire_lock(spool)
    assert str(other_owner.pid) in str(caught.value)
    assert spool in str(caught.value)


def test_a_second_owner_in_the_same_process_is_refused(spool):
    """A spool that this process owns already is refused."""
    lock = acquire_lock(spool)
    with pytest.raises(SpoolInUse, match=f"this process \\({os.getpid()}\\)"):
        acquire_lock(spool)
    lock.release()


@pytest.mark.parametrize("space", ["pid:[1]", ""])
def test_an_owner_in_another_container_is_named_as_such(spool, space):
    """Its number is that of another process here, if of any; a file without a namespace is of this one."""
    lock = acquire_lock(spool)
    me = os.getpid()
    Path(spool, "lock").write_text(f"{me:<31}\n{space}\n" if space else f"{me}\n")
    with pytest.raises(SpoolInUse) as caught:
        acquire_lock(spool)
    assert owner_pid(spool) == (0 if space else me)
    owner = f"process {me} of another container (pid namespace)" if space else f"this process ({me})"
    assert f"is in use by {owner}: use it from here with qflow.connect, close it there first" in str(caught.value)
    lock.release()


def test_a_refused_owner_leaves_no_descriptor_and_no_trace(spool):
    """A refused attempt closes what it opened and leaves the owner's pid in the file."""
    lock = acquire_lock(spool)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SpoolInUse):
        acquire_lock(spool)
    assert len(os.listdir("/proc/self/fd")) == before
    assert owner_pid(spool) == os.getpid()
    lock.release()


def test_a_lock_file_deleted_under_the_owner_still_keeps_others_out(spool, other_owner):
    """Deleting the lock file does not admit a second owner, for the directory is locked, too."""
    os.unlink(os.path.join(spool, "lock"))
    with pytest.raises(SpoolInUse):
        acquire_lock(spool)
    assert owner_pid(spool) == 0


def test_the_owner_is_known_through_a_link_to_the_spool_and_no_link_inside_is_followed(spool, tmp_path, other_owner):
    """Whoever names a spool may do so by a link; whoever plants one in it is told of."""
    link = tmp_path.parent / f"{tmp_path.name}.link"
    link.symlink_to(spool)
    assert owner_pid(link) == other_owner.pid
    other_owner.kill()
    other_owner.wait()
    assert owner_pid(link) is None
    os.unlink(os.path.join(spool, "lock"))
    os.symlink("elsewhere", os.path.join(spool, "lock"))
    with pytest.raises(StorageError, match="symbolic link"):
        owner_pid(link)
    link.unlink()


def test_a_link_that_leads_nowhere_is_told_as_one(tmp_path):
    """Where a disk is not mounted: nothing is made in its place."""
    link = tmp_path / "link"
    link.symlink_to("away")
    for spool in (link, f"{link}/"):
        with pytest.raises(qflow.InvalidArgument, match="is a link to 'away', where nothing is: make that directory"):
            qflow.open(spool)
    assert os.listdir(tmp_path) == ["link"]
    (tmp_path / "away").mkdir()
    with qflow.open(link) as broker:
        assert broker.check() == []


def test_the_directory_alone_does_not_admit_while_the_file_is_locked(spool, monkeypatch):
    """Both locks are needed: a holder of the file's lock alone keeps others out as well."""
    lock = acquire_lock(spool)
    os.close(lock._fds.pop(0))
    with pytest.raises(SpoolInUse):
        acquire_lock(spool)
    lock.release()


def test_a_lock_file_swapped_before_it_was_locked_is_opened_again(spool, monkeypatch):
    """A lock on a file that is no longer at the path is worth nothing, so the file at the path is locked instead."""
    path = os.path.join(spool, "lock")
    real_lock = lock_module._lock
    swaps = []

    def swap_then_lock(fd, where):
        if os.path.exists(path) and not swaps:
            os.unlink(path)
            swaps.append(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        real_lock(fd, where)

    monkeypatch.setattr(lock_module, "_lock", swap_then_lock)
    lock = acquire_lock(spool)
    assert os.path.samestat(os.stat(path), os.fstat(lock._fds[1]))
    assert os.path.samestat(os.stat(path), os.fstat(swaps[0]))
    os.close(swaps[0])
    lock.release()


def test_a_released_spool_can_be_owned_again(spool):
    """After release, and a second release that does nothing, the spool is free."""
    lock = acquire_lock(spool)
    lock.release()
    lock.release()
    assert owner_pid(spool) is None
    acquire_lock(spool).release()


def test_a_killed_owner_gives_the_spool_up(spool, other_owner):
    """The lock ends with the process that held it; its pid in the file means nothing then."""
    other_owner.kill()
    other_owner.wait()
    assert owner_pid(spool) is None
    acquire_lock(spool).release()


def in_child(work) -> int:
    """Run `work` in a forked child and return its exit status, 0 if it returned True."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(spool) -> bool:
    try:
        acquire_lock(spool)
    except SpoolInUse:
        return True
    return False


def test_a_forked_child_closes_its_copies_and_the_parent_still_owns(spool):
    """Closing in the child neither unlocks for the parent nor lets the child in."""
    lock = acquire_lock(spool)

    def child() -> bool:
        lock.close()
        return refused(spool)

    assert in_child(child) == 0
    assert owner_pid(spool) == os.getpid()
    assert refused(spool)
    lock.release()


def test_the_owner_gives_up_although_a_child_holds_copies(spool):
    """Release unlocks, so a child that inherited the descriptors and never closed them blocks nobody."""
    lock = acquire_lock(spool)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there)
        os.read(here, 1)  # until the parent closes its end
        os._exit(0)
    lock.release()
    assert not refused(spool)
    os.close(there)
    os.close(here)
    os.waitpid(child, 0)


def test_the_lock_descriptors_do_not_pass_to_programs_started(spool):
    """A program started by the owner inherits no descriptor of the lock."""
    lock = acquire_lock(spool)
    assert not any(os.get_inheritable(fd) for fd in lock._fds)
    lock.release()


@pytest.mark.parametrize("plant", ["symlink", "fifo", "directory"])
def test_a_planted_lock_file_is_refused_and_not_followed(spool, tmp_path, plant):
    """Anything but a file in place of the lock is an error, and what a link points to is not touched."""
    path = os.path.join(spool, "lock")
    target = tmp_path / "precious"
    target.write_text("precious")
    if plant == "symlink":
        os.symlink(target, path)
    elif plant == "fifo":
        os.mkfifo(path)
    else:
        os.mkdir(path)
    with pytest.raises(StorageError, match="lock the spool"):
        acquire_lock(spool)
    assert target.read_text() == "precious"


def test_looking_at_the_owner_disturbs_nothing(spool, other_owner):
    """Asking who owns a spool neither changes the lock file nor takes the lock away."""
    path = os.path.join(spool, "lock")
    before = os.stat(path)
    assert owner_pid(spool) == other_owner.pid
    after = os.stat(path)
    assert (before.st_mtime_ns, before.st_ino, before.st_size) == (after.st_mtime_ns, after.st_ino, after.st_size)
    with pytest.raises(SpoolInUse):
        acquire_lock(spool)


def test_looking_at_a_spool_never_locked_creates_nothing(tmp_path):
    """Asking about a directory without a lock file, or that does not exist, says nobody and leaves no file."""
    assert owner_pid(tmp_path) is None
    assert os.listdir(tmp_path) == []
    assert owner_pid(tmp_path / "missing") is None


def test_a_missing_spool_directory_cannot_be_locked(tmp_path):
    """Locking needs the directory; without it the error says what to do."""
    with pytest.raises(StorageError, match="lock the spool"):
        acquire_lock(tmp_path / "missing")


# The file system -----------------------------------------------------------------------------------------------------

MOUNTS = b"""\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:40 / /net rw - nfs4 server:/export rw
24 23 8:2 / /net/local rw - xfs /dev/sdb1 rw
25 22 0:41 / /with\\040space\\134and\\011tab rw - cifs //server/share rw
26 22 0:42 / /ssh rw - fuse.sshfs host: rw
27 22 8:3 / /ntfs rw - fuseblk /dev/sdc1 rw
28 22 8:4 / /twice rw - ext4 /dev/sdd1 rw
29 22 0:43 / /twice rw master:7 propagate_from:2 - 9p share rw
a line that makes no sense
30 22 0:44 / /\xff rw - ceph mon: rw
"""


@pytest.fixture
def mounts(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_bytes(MOUNTS)
    return str(path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/spool", "ext4"),
        ("/", "ext4"),
        ("/net", "nfs4"),
        ("/net/a/b", "nfs4"),
        ("/network", "ext4"),
        ("/net/local/q", "xfs"),
        ("/with space\\and\ttab/q", "cifs"),
        ("/ssh/q", "fuse.sshfs"),
        ("/ntfs/q", "fuseblk"),
        ("/twice/q", "9p"),
        (os.fsdecode(b"/\xff/q"), "ceph"),
        ("/net/local/../q", "nfs4"),
    ],
)
def test_the_longest_mount_point_tells_the_file_system(mounts, path, expected):
    """The type comes from the deepest mount above the path, the last one of equals, with escapes undone."""
    assert filesystem_type(path, mounts) == expected


@pytest.mark.parametrize("path", ["/net/q", "/with space\\and\ttab/q", "/ssh/q", "/twice/q"])
def test_a_network_file_system_is_refused_unless_overridden(mounts, path):
    """The error names the file system and the override, and the override works."""
    with pytest.raises(StorageError, match="unsafe_filesystem=True"):
        check_filesystem(path, mounts=mounts)
    check_filesystem(path, unsafe=True, mounts=mounts)


@pytest.mark.parametrize("path", ["/var/spool", "/net/local/q", "/ntfs/q"])
def test_a_local_file_system_is_accepted(mounts, path):
    """Local disks pass, below a network mount and by way of FUSE block devices, too."""
    check_filesystem(path, mounts=mounts)


def test_a_system_without_a_list_of_mounts_is_not_refused(tmp_path):
    """Where the mounts cannot be read nothing is known, and nothing is refused."""
    check_filesystem(tmp_path, mounts=str(tmp_path / "missing"))


def test_a_link_to_a_network_mount_is_followed(mounts, tmp_path):
    """What counts is where the spool really is."""
    os.symlink("/net/q", tmp_path / "link")
    with pytest.raises(StorageError, match="nfs4"):
        check_filesystem(tmp_path / "link" / "spool", mounts=mounts)


# Errors and operations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_lack_of_space_is_disk_full(number):
    """No space, no quota and a limit on the size of files are the error that says: try again when there is room."""
    error = storage_error(OSError(number, os.strerror(number)), "write a spill file", "/spool/spill")
    assert type(error) is DiskFull
    assert "cannot write a spill file (/spool/spill)" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EMFILE, errno.ENAMETOOLONG])
def test_another_failure_is_a_storage_error_with_a_remedy(number):
    """Any other failure says what was tried, where, what the system said, and what to do."""
    error = storage_error(OSError(number, os.strerror(number)), "read it", "/spool/spill")
    assert type(error) is StorageError
    assert os.strerror(number) in str(error)
    assert "; " in str(error)


def test_directories_are_made_however_deep(tmp_path):
    """Where the path is too long for the system, none is, and the error is the system's."""
    deep = os.path.join(tmp_path, *["a"] * 1500)
    make_directories(Files(), deep)
    with pytest.raises(OSError, match="too long"):
        make_directories(Files(), os.path.join(tmp_path, *["b"] * 3000))
    assert os.listdir(tmp_path) == ["a"]
    while deep != str(tmp_path):  # `shutil.rmtree` cannot
        os.rmdir(deep)
        deep = os.path.dirname(deep)


def test_a_directory_that_came_with_an_image_is_to_be_copied_to_a_volume():
    """As overlayfs renames none, and says that it is on another device."""
    error = OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    assert "copy the spool to a volume" in str(storage_error(error, "compact the log", "/spool"))


def test_a_log_on_a_file_system_of_its_own_is_not_compacted_and_that_is_said():
    """A place where something is mounted cannot be renamed."""
    error = OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    assert "mount one for all of the spool" in str(storage_error(error, "compact the log", "/spool"))


def test_a_small_file_is_replaced_whole(tmp_path):
    """The new content replaces the old one, privately, and leaves no other file."""
    path = str(tmp_path / "stats.json")
    Files().write_replacing(path, b"old and long")
    Files().write_replacing(path, b"new")
    with open(path, "rb") as file:
        assert file.read() == b"new"
    assert os.listdir(tmp_path) == ["stats.json"]
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("operation", ["pwrite", "rename"])
def test_a_failed_replacement_keeps_the_old_content(tmp_path, operation):
    """When writing or renaming fails, the old file stands and nothing is left beside it."""
    path = str(tmp_path / "stats.json")
    files = Files()
    files.write_replacing(path, b"old")

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "full")

    setattr(files, operation, fail)
    with pytest.raises(OSError, match="full"):
        files.write_replacing(path, b"new")
    with open(path, "rb") as file:
        assert file.read() == b"old"
    assert os.listdir(tmp_path) == ["stats.json"]


def test_short_writes_are_continued(tmp_path):
    """A system that takes three bytes at a time still gets all of them, in their places."""

    class Sluggish(Files):
        def pwrite(self, fd, data, position):
            return os.pwrite(fd, bytes(data[:3]), position)

    path = tmp_path / "file"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    assert write_all(Sluggish(), fd, b"0123456789", 2) == 12
    os.close(fd)
    assert path.read_bytes() == b"\0\x000123456789"


def test_the_seam_does_what_its_names_say(tmp_path):
    """Directories are private, allocation grows a file, syncing works on files and directories."""
    files = Files()
    directory = str(tmp_path / "d")
    files.make_directory(directory)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    path = os.path.join(directory, "f")
    fd = files.open(path, files_module.CREATE, 0o600)
    files.allocate(fd, 8192)
    assert files.lseek(fd, 0, os.SEEK_END) == files.allocated(fd) == 8192
    files.ftruncate(fd, 2**20)
    assert files.allocated(fd) == 0
    files.allocate_rest(fd, 5 * 2**20, 8192)
    assert files.allocated(fd) == 5 * 2**20
    files.close(fd)
    files.sync_file(path)
    files.sync_directory(directory)
    files.rename(path, path + "2")
    assert files.list(directory) == ["f2"]
    assert [entry.name for entry in files.scan(directory)] == ["f2"]
    assert files.exists(path + "2")
    assert not files.exists(path)
    files.unlink(path + "2")
    files.remove_directory(directory)
    assert os.listdir(tmp_path) == []


def test_syncing_a_link_does_not_follow_it(tmp_path):
    """A link in place of a file is an error."""
    os.symlink("/etc/hostname", tmp_path / "link")
    with pytest.raises(OSError, match="link"):
        Files().sync_file(str(tmp_path / "link"))
