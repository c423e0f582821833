//go:build bench

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	reviewRunning = "review, the session runs"
	reviewStopped = "review, it is stopped"
	reviewJSON    = "review --json, it is stopped"
	theLazygit    = "lazygit"
	plainDiff     = "git diff, piped to cat"
	rowFileList   = "until the files are listed, ms"
	rowChange     = "until the first change is shown, ms"

	repoDirs, repoFiles, repoLines = 500, 20, 120 // directories, files of each, lines of each
	changedFiles                   = repoDirs * repoFiles / 2

	// shownFile is in the list of files on the first screen, and nowhere else there.
	shownFile   = "file12.go"
	changedWord = "agentsWord"

	// agentsWork changes 20 lines, in four places, of every second file.
	agentsWork = `git ls-files | awk 'NR % 2' | xargs sed -i '10,14s/before/` + changedWord + `/; 40,44s/before/` + changedWord + `/; 70,74s/before/` + changedWord + `/; 100,104s/before/` + changedWord + `/'`

	envLazygit     = "BENCH_LAZYGIT"
	lazygitVersion = "v0.44.1"
)

// runWithLazygit runs the tests in this process, with lazygit.
func runWithLazygit(m *testing.M) int {
	code, err := func() (int, error) {
		dir, err := os.MkdirTemp("", "asz-bench")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		env, err := buildLazygit(context.Background(), dir)
		for _, e := range env {
			name, value, _ := strings.Cut(e, "=")
			err = errors.Join(err, os.Setenv(name, value))
		}
		if err != nil {
			return 1, err
		}
		return m.Run(), nil
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return code
}

// buildLazygit builds lazygit from its module, outside the namespace, where modules
// are available.
func buildLazygit(ctx context.Context, dir string) ([]string, error) {
	if part := os.Getenv("BENCH"); part != "" && part != partReview {
		return nil, nil
	}
	program := filepath.Join(dir, "lazygit")
	const module = "github.com/jesseduffield/lazygit"
	return []string{envLazygit + "=" + program}, buildModule(ctx, program, module, lazygitVersion, module, "main.version")
}

// TestReviewScreen measures how long a user waits for the files and the first change
// of a review. The VMs are fake; the rest is the real program. It shows an agent's
// commit. The others show the same changes in a work tree.
func TestReviewScreen(t *testing.T) {
	lists := func(key, mine, other string) comparison { return comparison{key: key, mine: mine, other: other} }
	table := results.table(table{title: titleReview, rows: []row{
		{name: rowFileList, unit: "ms", comparisons: []comparison{
			lists("review_running_files", reviewRunning, theLazygit),
			lists("review_stopped_files", reviewStopped, theLazygit),
			lists("review_json_files", reviewJSON, theLazygit),
			lists("review_running_files_vs_diff", reviewRunning, plainDiff),
			lists("review_stopped_files_vs_diff", reviewStopped, plainDiff),
		}},
		{name: rowChange, unit: "ms", comparisons: []comparison{
			lists("review_running_change", reviewRunning, theLazygit),
			lists("review_stopped_change", reviewStopped, theLazygit),
			lists("review_stopped_change_vs_diff", reviewStopped, plainDiff),
		}},
	}})
	b := realvm.NewBox(t)
	b.Binary = fakes(t)
	b.Env = append(b.Env, "AGENT_SESSIONIZER_IMAGE=ubuntu", "AGENT_SESSIONIZER_PREPARE=none", "TMPDIR="+b.Home, "LC_ALL=C.UTF-8")
	must := func(line string) {
		t.Helper()
		if r := b.Run("sh", "-ec", line); r.Code != 0 {
			t.Fatalf("%s = exit %d\n%s\nwant exit 0", line, r.Code, r.All())
		}
	}
	writeRepo(b)
	// Nothing may collect garbage while others are measured. Packed objects are what a clone has.
	must(`git config --global gc.auto 0; git init -q repo; cd repo; git add .; git commit -qm first; git gc -q`)
	must(`git clone -q repo tree; cd tree; ` + agentsWork + `; git status >/dev/null`)
	var names []string
	t.Cleanup(func() {
		if len(names) > 0 {
			b.Asz(append([]string{"destroy", "--force"}, names...)...)
		}
	})
	for range 2 {
		name := strings.TrimSpace(b.Asz("open", "-d", "--new", "--cpus=1", "--memory=512MiB", "--disk=4GiB", "./repo"))
		names = append(names, name)
		b.MustIn(name, agentsWork+` && git -c user.name=Agent -c user.email=agent@example.invalid commit -qam work`)
		b.Asz("fetch", name)
	}
	running, stopped := names[0], names[1]
	b.Asz("stop", stopped)

	b.Write("lazygit/config.yml", "disableStartupPopups: true\nupdate: {method: never}\ngit: {autoFetch: false}\n")
	lazygit := []string{os.Getenv(envLazygit), "--path", filepath.Join(b.Home, "tree"), "--use-config-dir", filepath.Join(b.Home, "lazygit")}
	screen := func(argv ...string) sample {
		ms := appears(t, b, argv, shownFile, changedWord)
		return sample{rowFileList: ms[0], rowChange: ms[1]}
	}
	for i := range runs()*perTurn + 1 {
		turn := map[string]sample{
			reviewRunning: screen(b.Binary, "review", running),
			reviewStopped: screen(b.Binary, "review", stopped),
			theLazygit:    screen(lazygit...),
		}
		began := time.Now()
		out := b.Asz("review", "--json", stopped)
		turn[reviewJSON] = sample{rowFileList: time.Since(began).Seconds() * 1000}
		var attempts []struct{ Files []json.RawMessage }
		if err := json.Unmarshal([]byte(out), &attempts); err != nil || len(attempts) != 1 || len(attempts[0].Files) != changedFiles {
			t.Fatalf("review --json = %.500s, %v, want %d files", out, err, changedFiles)
		}
		ms := appears(t, b, []string{"sh", "-c", "git -C tree diff | cat"}, changedWord, untilEnd)
		turn[plainDiff] = sample{rowChange: ms[0], rowFileList: ms[1]}
		for contender, s := range turn {
			if i > 0 { // the first turn fills the page cache
				table.add(contender, s)
			}
		}
	}
	table.done(t, runs(), reviewRunning, reviewStopped, reviewJSON, theLazygit, plainDiff)
}

// writeRepo writes the files of the repository, which look like code.
func writeRepo(b *realvm.Box) {
	for dir := range repoDirs {
		for file := range repoFiles {
			var text strings.Builder
			fmt.Fprintf(&text, "package dir%03d\n\n", dir)
			for n := range repoLines - 2 {
				fmt.Fprintf(&text, "func f%d_%d() string { return \"before\" } // %d\n", file, n, n*dir)
			}
			b.Write(fmt.Sprintf("repo/dir%03d/file%02d.go", dir, file), text.String())
		}
	}
}

// untilEnd means the end of a program, in place of a text.
const untilEnd = ""

// appears returns how many milliseconds a program takes until each text was on its
// terminal. The texts contain no space, so a program writes each without a sequence
// in it. Then the program is ended as a user would.
func appears(t *testing.T, b *realvm.Box, argv []string, texts ...string) []float64 {
	t.Helper()
	ms := make([]float64, len(texts))
	ok := t.Run("", func(t *testing.T) { // a subtest, so that one ends before the next begins
		began := time.Now()
		tty := terminal(t, b, argv...)
		if err := tty.SetReadDeadline(began.Add(longest)); err != nil {
			t.Fatal(err)
		}
		buf, kept := make([]byte, 64<<10), 0
		for missing := len(texts); missing > 0; {
			n, err := tty.Read(buf[kept:])
			now := time.Since(began).Seconds() * 1000
			ended := err != nil && !errors.Is(err, os.ErrDeadlineExceeded) // the terminal has no program any more
			seen := buf[:kept+n]
			for i, text := range texts {
				if ms[i] == 0 && (text == untilEnd && ended || text != untilEnd && bytes.Contains(seen, []byte(text))) {
					ms[i] = now
					missing--
				}
			}
			if err != nil && missing > 0 {
				t.Fatalf("%q: terminal = %q, %v, want %q", argv, seen, err, texts)
			}
			kept = copy(buf, seen[max(0, len(seen)-4<<10):]) // a text may be split between two reads
		}
		if _, err := tty.WriteString("q"); err != nil {
			return // it has ended
		}
		for _, err := tty.Read(buf); err == nil; {
			_, err = tty.Read(buf)
		}
	})
	if !ok {
		t.FailNow()
	}
	return ms
}

const (
	theSearch = "recordings search"
	theGrep   = "grep -rF"
	ripgrep   = "ripgrep"
	rowRare   = "a text that is in one line, ms"
	rowFold   = "the same, in any case, ms"

	subjects, partsEach, partSize = 64, 4, 4 << 20 // 1 GiB

	searched = "FAIL: TestLexer/escapes"
)

// TestReviewSearch searches 1 GiB of recordings in the page cache, and compares with
// programs that search the same files.
func TestReviewSearch(t *testing.T) {
	contenders := []string{theSearch, theGrep}
	argv := map[string][]string{
		theSearch: {"agent-sessionizer", "recordings", "search"},
		theGrep:   {"grep", "-rF", "--include=*.txt"},
		ripgrep:   {"rg", "-F", "--no-ignore", "--glob=*.txt"},
	}
	rare, fold := row{name: rowRare, unit: "ms"}, row{name: rowFold, unit: "ms"}
	rare.comparisons = []comparison{{key: "search_rare", mine: theSearch, other: theGrep}}
	fold.comparisons = []comparison{{key: "search_ignore_case", mine: theSearch, other: theGrep}}
	_, err := exec.LookPath("rg")
	if err == nil {
		contenders = append(contenders, ripgrep)
		rare.comparisons = append(rare.comparisons, comparison{key: "search_rare_vs_ripgrep", mine: theSearch, other: ripgrep})
		fold.comparisons = append(fold.comparisons, comparison{key: "search_ignore_case_vs_ripgrep", mine: theSearch, other: ripgrep})
	}
	table := results.table(table{title: titleSearch, rows: []row{rare, fold}})
	if err != nil {
		table.absent(ripgrep, "It is not installed.")
	}
	// An interrupted test ends with a failed command, and cleans up.
	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	t.Cleanup(stop)
	state, err := os.MkdirTemp(inMemory(2*subjects*partsEach*partSize), "asz-bench")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(state) })
	b := realvm.NewBox(t)
	b.Binary = fakes(t)
	b.Env = append(b.Env, "XDG_STATE_HOME="+state, "LC_ALL=C")
	store := recording.Store{Dir: filepath.Join(state, "agent-sessionizer", "recordings")}
	writeRecordings(t, store)

	for i := range runs()*perTurn + 1 {
		for _, c := range contenders {
			find := func(args ...string) float64 {
				args = append(append([]string{}, argv[c]...), args...)
				if c != theSearch {
					args = append(args, store.Dir)
				}
				began := time.Now()
				r := b.Run(args...)
				ms := time.Since(began).Seconds() * 1000
				if interrupted.Err() != nil || r.Code != 0 || strings.Count(r.Stdout, searched) != 1 {
					t.Fatalf("%q = exit %d\n%s\nwant one match", args, r.Code, r.All())
				}
				return ms
			}
			s := sample{rowRare: find(searched), rowFold: find("-i", strings.ToLower(searched))}
			if i > 0 { // the first turn fills the page cache
				table.add(c, s)
			}
		}
	}
	table.done(t, runs(), contenders...)
}

// inMemory returns a directory in memory with room for some bytes, or "" if there is
// none.
func inMemory(size int64) string {
	const dir = "/dev/shm"
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil || int64(fs.Bavail)*fs.Bsize < size {
		return ""
	}
	return dir
}

// writeRecordings writes the recordings of as many sessions: the output of tests,
// with the searched text in one line. A search reads only the first lines of the
// files that a player reads, so they have no more.
func writeRecordings(t *testing.T, store recording.Store) {
	t.Helper()
	write := func(path string, text []byte) {
		t.Helper()
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for subject := range subjects {
		dir := store.Subject(fmt.Sprintf("%012x", subject))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for part := range partsEach {
			var text bytes.Buffer
			for at := 0; text.Len() < partSize; at += random.IntN(100) {
				switch n := random.IntN(1000); n % 4 {
				case 0:
					fmt.Fprintf(&text, "%d\tok  \tgithub.com/example/project/pkg/part%d\t%d.%03ds  coverage: %d.%d%% of statements\n", at, n, n%9, n, n%100, n%10)
				case 1:
					fmt.Fprintf(&text, "%d\t=== RUN   TestLexer/case_%d\n", at, n)
				case 2:
					fmt.Fprintf(&text, "%d\t--- PASS: TestLexer/escapes_%d (0.%02ds)\n", at, n, n%100)
				case 3:
					fmt.Fprintf(&text, "%d\tlexer_test.go:%d: Fetch %d of %d: got %q\n", at, n, n%17, n, "Error: unexpected token")
				}
			}
			if subject == 7 && part == 2 {
				text.WriteString("9000000\t--- " + searched + " (0.01s)\n")
			}
			base := filepath.Join(dir, fmt.Sprintf("0-%d", part+1))
			write(base+".cast", []byte(`{"version":2,"width":80,"height":24,"timestamp":1700000000}`+"\n"))
			write(base+".txt", text.Bytes())
		}
	}
}
