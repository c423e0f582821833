package homearchive

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// allocated returns how much memory was allocated since the program started.
func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// tree is a directory with a test's files.
type tree struct {
	*os.Root
	t *testing.T
}

func newTree(t *testing.T, files map[string]string) tree {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	tr := tree{root, t}
	for name, content := range files {
		tr.put(name, content)
	}
	return tr
}

// put creates a file, or a link if content starts with "→".
func (tr tree) put(name, content string) {
	tr.t.Helper()
	err := tr.MkdirAll(filepath.Dir(name), 0o755)
	if to, ok := strings.CutPrefix(content, "→"); ok {
		err = errors.Join(err, os.Symlink(to, filepath.Join(tr.Name(), name)))
	} else {
		err = errors.Join(err, tr.WriteFile(name, []byte(content), 0o644))
	}
	if err != nil {
		tr.t.Fatal(err)
	}
}

func (tr tree) get(name string) string {
	tr.t.Helper()
	if to, err := tr.Readlink(name); err == nil {
		return "→" + to
	}
	b, err := tr.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return "(none)"
	}
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// want compares files with their expected content.
func (tr tree) want(files map[string]string) {
	tr.t.Helper()
	for name, content := range files {
		if got := tr.get(name); got != content {
			tr.t.Errorf("%q is %q, want %q", name, got, content)
		}
	}
}

// dotfiles returns the archive of the dotfiles and a list of what was left out.
func (tr tree) dotfiles() ([]byte, string) {
	tr.t.Helper()
	var b bytes.Buffer
	left, err := Dotfiles(&b, tr.Root, "project")
	if err != nil {
		tr.t.Fatal(err)
	}
	return b.Bytes(), told(left)
}

func told(left []Left) string {
	var all []string
	for _, l := range left {
		all = append(all, l.String())
	}
	return strings.Join(all, "\n")
}

func names(t *testing.T, archive []byte) []string {
	t.Helper()
	all, err := unpack(archive, SaveBounds(1<<30))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range all {
		out = append(out, e.Name)
	}
	return out
}

func TestDotfiles(t *testing.T) {
	tr := newTree(t, map[string]string{
		".zshrc": "mine", ".config/app/conf": "x", "bin/tool": "#!/bin/sh", "odd \xff\nname": "odd",
		".git/config": "not copied", ".vim/pack/x/.git": "gitdir: nowhere", ".vim/pack/x/plugin.vim": "copied",
		"project/file": "where the repository goes", ".netrc": "machine x", ".npmrc": "//r/:_authToken=abc", ".token": "ghp_" + strings.Repeat("x", 36),
		"in": "→.config/app/../app/conf", "dangling": "→not/there", ".config/up": "→../.zshrc",
		"out": "→../../etc/passwd", "abs": "→/etc/passwd", ".config/out": "→app/../../../x", ".git-credentials": "→.zshrc",
	})
	if err := errors.Join(
		tr.Mkdir("empty", 0o700), syscall.Mkfifo(filepath.Join(tr.Name(), "pipe"), 0o600),
		os.Chmod(filepath.Join(tr.Name(), "bin/tool"), 0o755|fs.ModeSetuid), os.Chmod(filepath.Join(tr.Name(), ".zshrc"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	socket, err := net.Listen("unix", shortSocket(t, tr.Name()))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	archive, left := tr.dotfiles()
	want := []string{
		".config", ".config/app", ".config/app/conf", ".config/up", ".vim", ".vim/pack", ".vim/pack/x", ".vim/pack/x/plugin.vim",
		".zshrc", "bin", "bin/tool", "dangling", "empty", "in", "odd \xff\nname",
	}
	if got := names(t, archive); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	for _, name := range []string{".netrc: contains a login", ".npmrc: contains a login", ".token: contains a token", "out: is a link to", "abs: is a link to", ".config/out: is a link to", ".git-credentials: ", "pipe: is not a file", "socket: is not a file", "project: is the location of the repository"} {
		if !strings.Contains(left, name) {
			t.Errorf("nothing is said of %q:\n%s", name, left)
		}
	}
	if n := strings.Count(left, "\n") + 1; n != 10 {
		t.Errorf("%d things are said:\n%s", n, left)
	}
	guest := newTree(t, nil)
	if _, err := Bring(guest.Root, bytes.NewReader(archive), BringOptions{First: true}); err != nil {
		t.Fatal(err)
	}
	guest.want(map[string]string{
		".zshrc": "mine", "in": "→.config/app/conf", "dangling": "→not/there", ".config/up": "→../.zshrc", "odd \xff\nname": "odd", ".netrc": "(none)",
	})
	for name, mode := range map[string]fs.FileMode{"bin/tool": 0o755, ".zshrc": 0o600, "empty": fs.ModeDir | 0o700} {
		if st, err := guest.Lstat(name); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v %v", name, st, err)
		}
	}
}

// shortSocket returns a path in dir that is short enough for a socket.
func shortSocket(t *testing.T, dir string) string {
	t.Helper()
	link := filepath.Join(os.TempDir(), fmt.Sprintf("h%d", os.Getpid()))
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(link) })
	return filepath.Join(link, "socket")
}

func TestDotfilesAreBounded(t *testing.T) {
	large := newTree(t, map[string]string{"a": "fine", "dir/huge": strings.Repeat("x", int(DotfileBounds().File)+1)})
	if _, err := Dotfiles(&bytes.Buffer{}, large.Root, ""); err == nil || !strings.Contains(err.Error(), `"dir/huge" is larger than 4 MiB`) {
		t.Error(err)
	}
	sum := newTree(t, nil)
	for i := range 9 {
		sum.put(fmt.Sprint("f", i), strings.Repeat("x", int(DotfileBounds().File)))
	}
	if _, err := Dotfiles(&bytes.Buffer{}, sum.Root, ""); err == nil || !strings.Contains(err.Error(), `"f7"`) || !strings.Contains(err.Error(), "32 MiB") {
		t.Error(err)
	}
	many := newTree(t, nil)
	for i := range DotfileBounds().Entries + 1 {
		many.put(fmt.Sprintf("%05d", i), "")
	}
	if _, err := Dotfiles(&bytes.Buffer{}, many.Root, ""); err == nil || !strings.Contains(err.Error(), `"10000"`) {
		t.Error(err)
	}
}

func TestBringKeepsWhatTheGuestChanged(t *testing.T) {
	host := newTree(t, map[string]string{
		"same": "1", "changed here": "1", "changed there": "1", "changed both": "1", "removed there": "1", "mode there": "1",
		"dir/gone": "1", "link": "→same", "link there": "→same", "shipped": "mine", "dir/file": "1",
	})
	guest := newTree(t, map[string]string{"shipped": "by the image", "other": "of the guest"})
	shipped := func(name string, content []byte) bool { return name == "shipped2" && string(content) == "by the image" }
	bring := func(first bool) string {
		t.Helper()
		archive, _ := host.dotfiles()
		left, err := Bring(guest.Root, bytes.NewReader(archive), BringOptions{First: first, Shipped: shipped})
		if err != nil {
			t.Fatal(err)
		}
		return told(left)
	}
	if left := bring(true); left != "" {
		t.Error(left)
	}
	guest.want(map[string]string{"same": "1", "shipped": "mine", "link": "→same", "other": "of the guest", "dir/file": "1"})

	for _, name := range []string{"changed there", "changed both"} {
		guest.put(name, "by the agent")
	}
	guest.put("shipped2", "by the image")
	guest.put("new there", "by the agent")
	if err := errors.Join(
		guest.Remove("removed there"), guest.RemoveAll("dir"), guest.Chmod("mode there", 0o600),
		guest.Remove("link there"), guest.Symlink("other", "link there"),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"changed here", "changed both", "removed there", "mode there", "dir/file", "dir/gone", "new here", "newdir/file", "shipped2", "new there"} {
		host.put(name, "2")
	}
	for _, name := range []string{"link", "link there"} {
		if err := host.Remove(name); err != nil {
			t.Fatal(err)
		}
		host.put(name, "→dir/file")
	}
	if left := bring(false); left != "" {
		t.Error(left)
	}
	want := map[string]string{
		"same": "1", "changed here": "2", "changed there": "by the agent", "changed both": "by the agent", "removed there": "(none)",
		"mode there": "1", "dir/file": "(none)", "link": "→dir/file", "link there": "→other", "new here": "2", "newdir/file": "2",
		"shipped2": "2", "new there": "by the agent", "other": "of the guest",
	}
	guest.want(want)
	// Files brought the second time belong to the user's dotfiles, too. No other file
	// does.
	for _, name := range []string{"changed here", "new here", "changed there", "shipped2"} {
		host.put(name, "3")
	}
	bring(false)
	want["changed here"], want["new here"], want["shipped2"] = "3", "3", "3"
	guest.want(want)
	// Without its record, a guest keeps all its files and accepts only the missing
	// ones.
	if err := guest.Remove(recordName); err != nil {
		t.Fatal(err)
	}
	host.put("same", "4")
	host.put("changed here", "4")
	bring(false)
	want["removed there"], want["dir/file"] = "2", "2"
	guest.want(want)
}

// TestBringFollowsNoLink checks that a planted link is not followed. On the first run,
// when no one can have made it on purpose, it is replaced; later it stays.
func TestBringFollowsNoLink(t *testing.T) {
	outside := newTree(t, map[string]string{"file": "outside", "conf/file": "outside"})
	host := newTree(t, map[string]string{".rc": "mine", ".config/app/conf": "mine", "a/b/c": "mine", "in": "mine"})
	archive, _ := host.dotfiles()
	plant := func() tree {
		guest := newTree(t, map[string]string{
			"elsewhere/app/conf": "inside", ".rc": "→" + outside.Name() + "/file", ".config": "→elsewhere", "a": "→" + outside.Name(), "in": "→elsewhere/app/conf",
		})
		return guest
	}
	first := plant()
	left, err := Bring(first.Root, bytes.NewReader(archive), BringOptions{First: true})
	if err != nil || len(left) > 0 {
		t.Error(left, err)
	}
	first.want(map[string]string{".rc": "mine", ".config/app/conf": "mine", "a/b/c": "mine", "in": "mine", "elsewhere/app/conf": "inside"})

	later := plant()
	if _, err = Bring(later.Root, bytes.NewReader(archive), BringOptions{}); err != nil {
		t.Fatal(err)
	}
	later.want(map[string]string{".rc": "→" + outside.Name() + "/file", ".config": "→elsewhere", "elsewhere/app/conf": "inside", "in": "→elsewhere/app/conf"})
	outside.want(map[string]string{"file": "outside", "conf/file": "outside", "b/c": "(none)", ".brought": "(none)"})
	entries, err := os.ReadDir(outside.Name())
	if err != nil || len(entries) != 2 {
		t.Errorf("outside are %v, %v", entries, err)
	}
}

func TestBringSaysWhatIsInTheWay(t *testing.T) {
	host := newTree(t, map[string]string{"file": "mine", "other": "mine"})
	archive, _ := host.dotfiles()
	guest := newTree(t, map[string]string{"file/is/a/directory": "x"})
	left, err := Bring(guest.Root, bytes.NewReader(archive), BringOptions{First: true})
	if err != nil || told(left) != "file: "+errInTheWay.Error() {
		t.Errorf("%q %v", told(left), err)
	}
	guest.want(map[string]string{"other": "mine", "file/is/a/directory": "x"})
}

// TestBringOfHalfAnArchive checks that a truncated archive is an error, that the record
// contains the files brought before, and that the next run continues.
func TestBringOfHalfAnArchive(t *testing.T) {
	host := newTree(t, map[string]string{"a": "1", "b": strings.Repeat("1", 1000)})
	archive, _ := host.dotfiles()
	guest := newTree(t, nil)
	if _, err := Bring(guest.Root, bytes.NewReader(archive[:len(archive)-100]), BringOptions{First: true}); err == nil {
		t.Error("half an archive is fine")
	}
	guest.want(map[string]string{"a": "1", "b": "(none)"})
	host.put("a", "2")
	archive, _ = host.dotfiles()
	if _, err := Bring(guest.Root, bytes.NewReader(archive), BringOptions{}); err != nil {
		t.Error(err)
	}
	guest.want(map[string]string{"a": "2", "b": strings.Repeat("1", 1000)})
	entries, err := os.ReadDir(guest.Name())
	if err != nil || len(entries) != 3 { // a, b, .local
		t.Errorf("%v %v", entries, err)
	}
}

func (tr tree) keep(o SaveOptions) ([]byte, string) {
	tr.t.Helper()
	var b bytes.Buffer
	left, err := Save(&b, tr.Root, o)
	if err != nil {
		tr.t.Fatal(err)
	}
	return b.Bytes(), told(left)
}

func TestKeepAndRestore(t *testing.T) {
	outside := newTree(t, map[string]string{"file": "outside"})
	old := newTree(t, map[string]string{
		".claude/projects/p/1.jsonl": "one", ".claude/projects/p/2.jsonl": "two", ".claude/settings.json": "as brought", ".claude/.credentials.json": "login",
		".claude/projects/link": "→" + outside.Name(), ".claude/projects/key": "-----BEGIN PRIVATE KEY-----\n", ".codex/sessions/odd\n\xff": "odd",
		".codex/auth.json": "login", ".zsh_history": "ls", "project/.claude/projects/x": "the checkout's", ".other": "not asked for",
	})
	if err := syscall.Mkfifo(filepath.Join(old.Name(), ".claude/projects/pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	when := time.Unix(1_600_000_000, 0)
	if err := errors.Join(old.Chmod(".zsh_history", 0o600), old.Chtimes(".zsh_history", when, when)); err != nil {
		t.Fatal(err)
	}
	all := append(Agents(), ".zsh_history", ".claude", "project", "*/.claude")
	archive, left := old.keep(SaveOptions{
		Patterns: all, Not: "project", Bounds: SaveBounds(1 << 20),
		Ours: func(name string, _ fs.FileMode, content []byte) bool { return string(content) == "as brought" },
	})
	got := names(t, archive)
	slices.Sort(got)
	if want := []string{".claude/projects/p/1.jsonl", ".claude/projects/p/2.jsonl", ".codex/sessions/odd\n\xff", ".zsh_history"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	for _, name := range []string{".claude/.credentials.json: contains a login", ".claude/projects/key: contains a private key"} {
		if !strings.Contains(left, name) {
			t.Errorf("nothing is said of %s: %s", name, left)
		}
	}

	fresh := newTree(t, map[string]string{".zsh_history": "by the image", ".claude": "→" + outside.Name()})
	o := RestoreOptions{First: true, Patterns: all, Not: "project", Bounds: SaveBounds(1 << 20)}
	notes, err := Restore(fresh.Root, bytes.NewReader(archive), o)
	if err != nil || len(notes) > 0 {
		t.Error(notes, err)
	}
	fresh.want(map[string]string{".zsh_history": "ls", ".claude/projects/p/1.jsonl": "one", ".codex/sessions/odd\n\xff": "odd"})
	if st, err := fresh.Stat(".zsh_history"); err != nil || st.Mode() != 0o600 || !st.ModTime().Equal(when) {
		t.Errorf("%v %v", st, err)
	}
	if st, err := fresh.Stat(".codex"); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", st, err)
	}

	// A home directory that is in use receives only missing files.
	used := newTree(t, map[string]string{".zsh_history": "in use", ".codex": "→elsewhere", "elsewhere/x": ""})
	o.First = false
	if _, err = Restore(used.Root, bytes.NewReader(archive), o); err != nil {
		t.Error(err)
	}
	used.want(map[string]string{".zsh_history": "in use", ".claude/projects/p/2.jsonl": "two", ".codex": "→elsewhere", "elsewhere/sessions/odd\n\xff": "(none)"})
	if entries, err := os.ReadDir(outside.Name()); err != nil || len(entries) != 1 {
		t.Errorf("outside are %v, %v", entries, err)
	}
}

// TestRestoreOfAHostileArchive checks that files which a guest adds to its archive,
// beyond those to be kept, do not reach the next guest.
func TestRestoreOfAHostileArchive(t *testing.T) {
	archive := pack(t,
		file(".claude/projects/fine", "fine"), file(".bashrc", "evil"), file(".ssh/authorized_keys", "evil"), file(".claude/.credentials.json", "evil"),
		Entry{Name: ".claude/projects/link", Mode: fs.ModeSymlink | 0o777, Content: []byte("/etc")}, file("project/Makefile", "evil"),
		Entry{Name: ".claude/projects/dir", Mode: fs.ModeDir | 0o777}, file(".claude/projects/link/passwd", "evil"),
	)
	guest := newTree(t, nil)
	if _, err := Restore(guest.Root, bytes.NewReader(archive), RestoreOptions{
		First: true, Patterns: Patterns{".claude", ".ssh", "project"}, Not: "project", Bounds: SaveBounds(1 << 20),
	}); err != nil {
		t.Fatal(err)
	}
	guest.want(map[string]string{
		".claude/projects/fine": "fine", ".bashrc": "(none)", ".ssh/authorized_keys": "(none)", ".claude/.credentials.json": "(none)",
		"project/Makefile": "(none)", ".claude/projects/link/passwd": "evil", // a directory of that name, in the home directory
	})
	if _, err := guest.Lstat(".claude/projects/dir"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("an empty directory came back")
	}
}

// TestKeepTakesTheNewest checks that the newest files are kept if there are too many.
func TestKeepTakesTheNewest(t *testing.T) {
	tr := newTree(t, nil)
	for i := range 6 {
		name := fmt.Sprintf("t/%d", i)
		tr.put(name, strings.Repeat("x", 1000))
		when := time.Unix(int64(1000+100*(i*4%6)+i), 0) // newest: 4 and 1
		if err := tr.Chtimes(name, when, when); err != nil {
			t.Fatal(err)
		}
	}
	archive, left := tr.keep(SaveOptions{Patterns: Patterns{"t"}, Bounds: SaveBounds(2500)})
	if got := names(t, archive); !slices.Equal(got, []string{"t/4", "t/1"}) {
		t.Errorf("%q", got)
	}
	if !strings.Contains(left, "4 older files") || len(archive) > 2500 {
		t.Errorf("%d bytes, %q", len(archive), left)
	}
	if archive, _ = tr.keep(SaveOptions{Patterns: Patterns{"none"}, Bounds: SaveBounds(2500)}); len(names(t, archive)) != 0 {
		t.Error("something is kept that nobody asked for")
	}
}

// TestBringRecordsNothingThroughALink checks that in a guest that is in use, the record
// of the dotfiles is neither written through a link nor replaces it.
func TestBringRecordsNothingThroughALink(t *testing.T) {
	from := newTree(t, map[string]string{".vimrc": "mine"})
	archive, _ := from.dotfiles()
	to := newTree(t, map[string]string{".local": "→elsewhere", "elsewhere/file": "theirs"})
	if _, err := Bring(to.Root, bytes.NewReader(archive), BringOptions{}); err == nil {
		t.Error("no error")
	}
	to.want(map[string]string{".local": "→elsewhere", "elsewhere/file": "theirs", "elsewhere/state/agent-sessionizer/dotfiles": "(none)", ".vimrc": "mine"})
}

// lossy is a writer that accepts a number of bytes and then fails.
type lossy struct{ left int }

func (w *lossy) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		return 0, errors.New("disk full")
	}
	return len(p), nil
}

// TestArchivesThatCannotBeWritten checks that a failed write is reported, at any
// position of the archive.
func TestArchivesThatCannotBeWritten(t *testing.T) {
	tr := newTree(t, map[string]string{"a": "one", "b/c": "two"})
	whole, _ := tr.dotfiles()
	kept, _ := tr.keep(SaveOptions{Patterns: Patterns{"a", "b"}, Bounds: SaveBounds(1 << 20)})
	for n := range whole {
		if _, err := Dotfiles(&lossy{n}, tr.Root, ""); err == nil || !strings.Contains(err.Error(), "disk full") {
			t.Errorf("dotfiles after %d bytes: %v", n, err)
		}
	}
	for n := range kept {
		if _, err := Save(&lossy{n}, tr.Root, SaveOptions{Patterns: Patterns{"a", "b"}, Bounds: SaveBounds(1 << 20)}); err == nil || !strings.Contains(err.Error(), "disk full") {
			t.Errorf("what is kept after %d bytes: %v", n, err)
		}
	}
	gone := newTree(t, nil)
	_ = gone.Close()
	if _, err := Dotfiles(&bytes.Buffer{}, gone.Root, ""); err == nil {
		t.Error("dotfiles of a directory that cannot be read")
	}
	if _, err := Save(&bytes.Buffer{}, gone.Root, SaveOptions{Bounds: SaveBounds(1 << 20)}); err == nil {
		t.Error("nothing of a home directory that cannot be read is kept")
	}
}

// TestWhatIsNoArchiveChangesNothing checks that input that is not an archive is an
// error and changes nothing.
func TestWhatIsNoArchiveChangesNothing(t *testing.T) {
	guest := newTree(t, map[string]string{"a": "mine"})
	for _, stream := range []string{"", "hello, world"} {
		if _, err := Bring(guest.Root, strings.NewReader(stream), BringOptions{First: true}); err == nil {
			t.Errorf("%q is brought", stream)
		}
		if _, err := Restore(guest.Root, strings.NewReader(stream), RestoreOptions{First: true, Patterns: Patterns{"*"}, Bounds: SaveBounds(1 << 20)}); err == nil {
			t.Errorf("%q is restored", stream)
		}
	}
	half := pack(t, file("b", "one"), file("c", "two"))
	if _, err := Restore(guest.Root, bytes.NewReader(half[:len(half)-1]), RestoreOptions{First: true, Patterns: Patterns{"*"}, Bounds: SaveBounds(1 << 20)}); err == nil {
		t.Error("half an archive is restored")
	}
	guest.want(map[string]string{"a": "mine", recordName: "(none)"})
}

// TestWhatIsLeftOutIsTold checks that the first twenty left-out files are listed
// individually and the rest is counted.
func TestWhatIsLeftOutIsTold(t *testing.T) {
	for n, want := range map[int]string{20: "f19: why", 21: "and 1 more", 25: "and 5 more"} {
		var o leftOut
		for i := range n {
			o.add(Left{Name: fmt.Sprint("f", i), Why: "why"})
		}
		all := o.list()
		if len(all) != min(n, 21) || all[0].String() != "f0: why" || all[len(all)-1].String() != want {
			t.Errorf("%d: %d lines, the last %q", n, len(all), all[len(all)-1])
		}
	}
}

// TestKeepAtItsBounds checks that a file at the bound is kept, and that a file with one
// more byte is left out and reported.
func TestKeepAtItsBounds(t *testing.T) {
	tr := newTree(t, map[string]string{"t/fits": "12345", "t/large": "123456"})
	bounds := Bounds{Entries: 10, File: 5, Total: 1 << 20}
	archive, left := tr.keep(SaveOptions{Patterns: Patterns{"t"}, Bounds: bounds})
	if got := names(t, archive); !slices.Equal(got, []string{"t/fits"}) || left != "t/large: larger than 0 MiB" {
		t.Errorf("%q, %q", got, left)
	}
	one := frame("t/fits") + 5 + EmptySize
	archive, left = tr.keep(SaveOptions{Patterns: Patterns{"t/fits"}, Bounds: Bounds{Entries: 1, File: 5, Total: one}})
	if got := names(t, archive); len(got) != 1 || left != "" || int64(len(archive)) != one {
		t.Errorf("%q, %q, %d bytes of %d", got, left, len(archive), one)
	}
	for _, bounds := range []Bounds{{Entries: 1, File: 5, Total: one - 1}, {Entries: 0, File: 5, Total: one}} {
		archive, left = tr.keep(SaveOptions{Patterns: Patterns{"t/fits"}, Bounds: bounds})
		if got := names(t, archive); len(got) != 0 || !strings.HasPrefix(left, "1 older files") {
			t.Errorf("%+v: %q, %q", bounds, got, left)
		}
	}
}

// TestBroughtIsKnown checks that brought dotfiles keep their permissions and times, and
// that Brought recognizes them.
func TestBroughtIsKnown(t *testing.T) {
	host := newTree(t, map[string]string{"dir/a": "one"})
	when := time.Unix(1_500_000_000, 0)
	if err := errors.Join(host.Chmod("dir", 0o750), host.Chmod("dir/a", 0o640), host.Chtimes("dir/a", when, when)); err != nil {
		t.Fatal(err)
	}
	archive, _ := host.dotfiles()
	guest := newTree(t, nil)
	if _, err := Bring(guest.Root, bytes.NewReader(archive), BringOptions{First: true}); err != nil {
		t.Fatal(err)
	}
	if st, err := guest.Stat("dir"); err != nil || st.Mode().Perm() != 0o750 {
		t.Errorf("dir: %v, %v", st, err)
	}
	if st, err := guest.Stat("dir/a"); err != nil || st.Mode() != 0o640 || !st.ModTime().Equal(when) {
		t.Errorf("dir/a: %v, %v", st, err)
	}
	if st, err := guest.Stat(recordName); err != nil || st.Mode() != 0o600 {
		t.Errorf("the record: %v, %v", st, err)
	}
	brought := Brought(guest.Root)
	for _, c := range []struct {
		name, content string
		mode          fs.FileMode
		want          bool
	}{
		{"dir/a", "one", 0o640, true},
		{"dir/a", "two", 0o640, false},
		{"dir/a", "one", 0o600, false},
		{"dir/b", "one", 0o640, false},
	} {
		if brought(c.name, c.mode, []byte(c.content)) != c.want {
			t.Errorf("%s %o %q is brought: %v", c.name, c.mode, c.content, !c.want)
		}
	}
}

// What is in the guest as it comes is not written again.
func TestBringLeavesWhatIsTheSame(t *testing.T) {
	host, guest := newTree(t, map[string]string{"a": "one"}), newTree(t, nil)
	var was fs.FileInfo
	for i, first := range []bool{true, false, false} {
		archive, _ := host.dotfiles()
		if _, err := Bring(guest.Root, bytes.NewReader(archive), BringOptions{First: first}); err != nil {
			t.Fatal(err)
		}
		is, err := guest.Stat("a")
		if err != nil || was != nil && !os.SameFile(was, is) {
			t.Errorf("the file was replaced at time %d: %v", i+1, err)
		}
		was = is
	}
}
