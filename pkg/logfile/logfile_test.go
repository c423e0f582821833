package logfile

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain runs one of the processes that this test binary can be: ROLE PATH ARGUMENT…
func TestMain(m *testing.M) {
	role := os.Getenv("LOGFILE_TEST_ROLE")
	if role == "" {
		os.Exit(testenv.Run(m))
	}
	path, who := os.Args[1], os.Args[2]
	var err error
	switch role {
	case "write":
		f := &File{Path: path, Limits: Limits{Max: 64 << 10}}
		for n := 0; n < 5000 && err == nil; n++ {
			_, err = f.Write([]byte(record(who, n)))
		}
	case "commit":
		for n := 0; err == nil; n++ {
			err = Commit(context.Background(), path, Limits{Max: 256 << 10}, []byte(record(who, n, 20<<10)))
			fmt.Println(n)
		}
	case "standard":
		s := NewStandard(path, Limits{Max: 4000, Keep: 1})
		for n := range 300 {
			fmt.Fprint(s, record(who, n))
		}
		fmt.Println("the standard output")
		panic("the last words")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func process(t *testing.T, role string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), "LOGFILE_TEST_ROLE="+role)
	return cmd
}

// record returns the nth record of a process: WHO N LENGTH xxx…. Its length differs
// from that of the previous record.
func record(who string, n int, length ...int) string {
	pad := n * 37 % 400
	if len(length) > 0 {
		pad = length[0] + n%100
	}
	return fmt.Sprintf("%s %d %d %s\n", who, n, pad, strings.Repeat("x", pad))
}

// records returns the record numbers in the files of path, in order, by process.
func records(t *testing.T, path string) map[string][]int {
	t.Helper()
	files, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]int{}
	for _, f := range files {
		defer f.Close()
		in := bufio.NewScanner(f)
		in.Buffer(nil, 1<<20)
		for in.Scan() {
			if in.Text() == "" {
				continue
			}
			var who, pad string
			var n, length int
			if _, err := fmt.Sscanf(in.Text()+"|", "%s %d %d %s", &who, &n, &length, &pad); err != nil || len(pad) != length+1 || strings.Trim(pad, "x") != "|" {
				t.Errorf("record in %s = %.80q, want it whole", f.Name(), in.Text())
				continue
			}
			found[who] = append(found[who], n)
		}
		if err := in.Err(); err != nil {
			t.Fatal(err)
		}
	}
	return found
}

func countTo(t *testing.T, who string, got []int, n int) {
	t.Helper()
	for i, x := range got {
		if x != i {
			t.Fatalf("record %d of %s = %d, want %d", i, who, x, i)
		}
	}
	if len(got) != n {
		t.Fatalf("records of %s = %d, want %d", who, len(got), n)
	}
}

func old(t *testing.T, path string) []oldFile {
	t.Helper()
	files, err := oldFiles(path)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func write(t *testing.T, f *File, records ...string) {
	t.Helper()
	for _, r := range records {
		if _, err := f.Write([]byte(r)); err != nil {
			t.Fatal(err)
		}
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestManyProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	var all []*exec.Cmd
	for p := range 4 {
		cmd := process(t, "write", path, "p"+strconv.Itoa(p))
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all = append(all, cmd)
	}
	for _, cmd := range all {
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	found := records(t, path)
	for p := range 4 {
		who := "p" + strconv.Itoa(p)
		countTo(t, who, found[who], 5000)
	}
	if n := len(old(t, path)); n < 3 {
		t.Errorf("rotations = %d, want at least 3", n)
	}
}

func TestBounds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f := &File{Path: path, Limits: Limits{Max: 1000, Keep: 3}}
	defer f.Close()
	for _, other := range []string{"log.bak", "log.20260101T000000.000Z.gz", "log.1", "other.20260101T000000.000Z"} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), other), []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 200 {
		write(t, f, record("p", n))
	}
	files := old(t, path)
	if len(files) != 3 {
		t.Errorf("old files = %d, want 3", len(files))
	}
	for _, name := range append([]string{path}, files[0].path, files[1].path, files[2].path) {
		if st, err := os.Stat(name); err != nil || st.Size() > 1000 || st.Size() == 0 || st.Mode().Perm() != 0o600 {
			t.Errorf("%s = %d bytes, mode %v, %v, want 1 to 1000, 0600", name, st.Size(), st.Mode(), err)
		}
	}
	got := records(t, path)["p"]
	for i, n := range got { // the newest, without a gap
		if n != 200-len(got)+i {
			t.Fatalf("records = %v, want the newest, up to 199, without a gap", got)
		}
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 3+1+4 {
		t.Errorf("entries = %v, %v, want 3 old files, the log and 4 others", entries, err)
	}
	// A single record that is larger than a file.
	write(t, f, record("big", 0, 5000))
	write(t, f, record("big", 1, 10))
	countTo(t, "big", records(t, path)["big"], 2)
}

func TestPeriods(t *testing.T) {
	day := 24 * time.Hour
	for _, c := range []struct {
		every Period
		ago   time.Duration
		turns bool
	}{
		{Daily, day, true},
		{Daily, 0, false},
		{Daily, -2 * day, false}, // the clock was set back
		{Hourly, time.Hour, true},
		{Hourly, 0, false},
		{Never, 1000 * day, false},
		{"", 1000 * day, false},
	} {
		path := filepath.Join(t.TempDir(), "log")
		f := &File{Path: path, Limits: Limits{Every: c.every}}
		write(t, f, "one\n")
		at := time.Now().Add(-c.ago)
		if c.ago == 0 { // within the period, whatever the current time is
			at = c.every.begin(at)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		before := c.every.begin(time.Now())
		write(t, f, "two\n")
		if c.ago == 0 && !c.every.begin(time.Now()).Equal(before) {
			continue // a new hour has begun
		}
		if turned := len(old(t, path)) == 1; turned != c.turns {
			t.Errorf("log turned = %t, want %t for %+v", turned, c.turns, c)
		}
		f.Close()
	}
}

// TestClockSetBack checks that old files sort in the order in which they were written,
// whatever the clock does.
func TestClockSetBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	future := path + "." + time.Now().Add(time.Hour).UTC().Format(stampFormat)
	if err := os.WriteFile(future, []byte(record("p", 0)), 0o600); err != nil {
		t.Fatal(err)
	}
	f := &File{Path: path, Limits: Limits{Max: 1, Keep: 10}}
	defer f.Close()
	write(t, f, record("p", 1), record("p", 2), record("p", 3))
	countTo(t, "p", records(t, path)["p"], 4)
}

// TestMovedAway covers another program that moves or removes the file, such as
// logrotate.
func TestMovedAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f := &File{Path: path}
	defer f.Close()
	write(t, f, "one\n")
	if err := os.Rename(path, path+".moved"); err != nil {
		t.Fatal(err)
	}
	write(t, f, "two\n")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	write(t, f, "three\n")
	if got := content(t, path+".moved") + content(t, path); got != "one\nthree\n" {
		t.Errorf("moved and new log = %q, want \"one\\nthree\\n\"", got)
	}
	// If the directory is gone, an error is returned, and the record goes to the same
	// file as the last one.
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	lost := &File{Path: filepath.Join(dir, "log")}
	defer lost.Close()
	write(t, lost, "one\n")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	write(t, lost, "two\n")
	if _, err := os.Stat(dir); err == nil {
		t.Error("directory of the log exists again, want it missing")
	}
	if _, err := (&File{Path: filepath.Join(dir, "log")}).Write([]byte("x\n")); err == nil {
		t.Error("Write to a missing directory = nil, want an error")
	}
}

// TestTornRecord checks that a partial record of a killed process or a full disk
// damages no other record.
func TestTornRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f := &File{Path: path}
	defer f.Close()
	write(t, f, "one\n")
	torn, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer torn.Close()
	if _, err := torn.WriteString("to"); err != nil {
		t.Fatal(err)
	}
	write(t, f, "two\n", "three\n")
	if got := content(t, path); got != "one\nto\ntwo\nthree\n" {
		t.Errorf("log = %q, want \"one\\nto\\ntwo\\nthree\\n\"", got)
	}
}

// TestHeldLock checks that a process that was stopped while it renamed the file blocks
// no other writer.
func TestHeldLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f := &File{Path: path, Limits: Limits{Max: 10}}
	defer f.Close()
	write(t, f, record("p", 0))
	stopped, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer stopped.Close()
	if err := unix.Flock(int(stopped.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	write(t, f, record("p", 1), record("p", 2))
	if n := len(old(t, path)); n != 0 {
		t.Errorf("old files while the lock is held = %d, want 0", n)
	}
	if err := unix.Flock(int(stopped.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	write(t, f, record("p", 3))
	if n := len(old(t, path)); n != 1 {
		t.Errorf("old files after the lock is released = %d, want 1", n)
	}
	countTo(t, "p", records(t, path)["p"], 4)
}

func TestCommit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	l := Limits{Max: 300, For: 24 * time.Hour}
	for age, name := range map[time.Duration]string{25 * time.Hour: "too old", 23 * time.Hour: "young"} {
		if err := os.WriteFile(path+"."+time.Now().Add(-age).UTC().Format(stampFormat), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 5 {
		if err := Commit(t.Context(), path, l, []byte(record("p", n, 100))); err != nil {
			t.Fatal(err)
		}
	}
	files := old(t, path)
	if len(files) != 3 || content(t, files[0].path) != "young" {
		t.Errorf("old files = %v, want 3, the oldest of them \"young\"", files)
	}
	if err := os.Remove(files[0].path); err != nil {
		t.Fatal(err)
	}
	countTo(t, "p", records(t, path)["p"], 5)
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode of the log = %v, %v, want 0600", st.Mode(), err)
	}
	// A partial record is removed, even if it is the whole content of the file.
	for _, torn := range []string{record("p", 0, 100) + "p 1 ", "p 0", strings.Repeat("x", 10000)} {
		if err := os.WriteFile(path, []byte(torn), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Commit(t.Context(), path, Limits{}, []byte("whole\n")); err != nil {
			t.Fatal(err)
		}
		if got := content(t, path); got != torn[:strings.LastIndex(torn, "\n")+1]+"whole\n" {
			t.Errorf("log of %.20q after Commit = %.80q, want its whole lines and \"whole\"", torn, got)
		}
	}
	if err := Commit(t.Context(), filepath.Join(path, "no", "directory"), Limits{}, []byte("x\n")); err == nil {
		t.Error("Commit to a missing directory = nil, want an error")
	}
}

// TestCommitWaits checks that Commit waits for another writer, but not longer than its
// context allows.
func TestCommitWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	busy, err := lockFile(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Commit(ctx, path, Limits{}, []byte("one\n")); err == nil {
		t.Fatal("Commit while another process writes = nil, want an error")
	}
	done := make(chan error, 1)
	go func() { done <- Commit(t.Context(), path, Limits{}, []byte("two\n")) }()
	// The file is renamed while the other writer waits for it.
	if _, err := busy.WriteString("zero\n"); err != nil {
		t.Fatal(err)
	}
	if err := turn(path, Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := busy.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	files, err := Open(path)
	if err != nil || len(files) != 2 {
		t.Fatalf("Open = %v, %v, want 2 files", files, err)
	}
	var all string
	for _, f := range files {
		b, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		all += string(b)
		f.Close()
	}
	if all != "zero\ntwo\n" {
		t.Errorf("records = %q, want \"zero\\ntwo\\n\"", all)
	}
}

// TestCommitKilled kills processes at any moment of a commit. Records whose Commit
// returned stay, and partial ones do not disturb other processes.
func TestCommitKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	told := map[string]int{}
	for round := range 20 {
		who := "p" + strconv.Itoa(round)
		cmd := process(t, "commit", path, who)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; n < 1+round%4 && lines.Scan(); n++ {
			told[who]++
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() {
			told[who]++
		}
		_ = cmd.Wait() // killed
	}
	if err := Commit(t.Context(), path, Limits{}, []byte(record("last", 0))); err != nil {
		t.Fatal(err)
	}
	found := records(t, path)
	countTo(t, "last", found["last"], 1)
	for who, n := range told {
		if n == 0 || len(found[who]) < n || len(found[who]) > n+1 { // one more record may exist, whose Commit never returned
			t.Errorf("records of %s = %d, want the %d committed ones or one more", who, len(found[who]), n)
		}
		countTo(t, who, found[who], len(found[who]))
	}
}

func TestStandard(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "keeper.log")
	run := func(to string) {
		t.Helper()
		log, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		cmd := process(t, "standard", path, "p")
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Run(); err == nil {
			t.Fatal("child that panics = nil, want an error")
		}
	}
	run(path)
	if n := len(old(t, path)); n != 1 {
		t.Errorf("old files = %d, want 1", n)
	}
	last := content(t, path)
	_, words, ok := strings.Cut(last, record("p", 299))
	if !ok || !strings.Contains(words, "the standard output\n") || !strings.Contains(words, "panic: the last words") {
		t.Errorf("end of the log = %.2000q, want the standard output and the panic", last)
	}
	if len(last)-len(words) > 4000 {
		t.Errorf("log = %d bytes, want the record and at most 4000 after it", len(last))
	}
	// If standard error is another file, it stays unchanged.
	other := filepath.Join(dir, "mine")
	run(other)
	if all := content(t, other); strings.Count(all, "\np ") != 299 || content(t, path) != last {
		t.Errorf("records in the other log = %d, log changed: %t, want 299, false", strings.Count(all, "\np "), content(t, path) != last)
	}
}
