//go:build fault

package fault

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
)

// printing is a program that prints numbered lines: enough for several parts of a recording, and for some
// to be removed.
const printing = `i=0; while :; do t=; for j in 1 2 3 4 5 6 7 8 9 10; do i=$((i+1)); t="${t}line-$i. ` +
	`abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz\n"; done; printf "$t"; sleep 0.01; done`

// numbered matches what it prints.
var numbered = regexp.MustCompile(`line-([0-9]+)\.`)

// isSessionKeeper reports whether a process is the keeper of a session.
func isSessionKeeper(line string) bool { return strings.Contains(line, " keeper ") }

// recorded is what a recording has.
type recorded struct {
	id          string
	first, last int      // lines
	gaps        []string // between them, where the screen was not drawn again
	parts       int
}

// readRecording exports the only recording, and checks that it is an asciicast v2 file. Before there is one, it
// returns the zero value.
func (w *world) readRecording() (r recorded, err error) {
	out, err := w.run(nil, "agent-sessionizer", "recordings", "list", "--json")
	if err != nil {
		return r, err
	}
	var all []struct {
		ID    string
		Parts int
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) == 0 {
		return r, err
	}
	if len(all) > 1 {
		return r, fmt.Errorf("one terminal has the recordings %s", out)
	}
	r.id, r.parts = all[0].ID, all[0].Parts
	cast, err := w.run(nil, "agent-sessionizer", "recordings", "export", r.id)
	if err != nil {
		return r, err
	}
	shown, err := parseCast(cast)
	if err != nil {
		return r, err
	}
	end := 0
	for _, m := range numbered.FindAllStringSubmatchIndex(shown, -1) {
		n, err := strconv.Atoi(shown[m[2]:m[3]])
		if err != nil {
			return r, err
		}
		if r.first == 0 {
			r.first = n
		} else if between := shown[end:m[0]]; n > r.last+1 && !strings.Contains(between, "\x1b") {
			r.gaps = append(r.gaps, fmt.Sprintf("%d to %d: %q", r.last, n, between))
		}
		r.last, end = max(r.last, n), m[1] // a part begins with what the screen shows, which was recorded before
	}
	return r, nil
}

// parseCast returns the output in an asciicast v2 file, each line of which must be complete and valid.
func parseCast(cast string) (output string, err error) {
	if !strings.HasSuffix(cast, "\n") || !utf8.ValidString(cast) {
		return "", errors.New("the file does not end with a line end, or is not UTF-8")
	}
	var b strings.Builder
	last := 0.0
	for i, line := range strings.Split(strings.TrimSuffix(cast, "\n"), "\n") {
		if i == 0 {
			var h struct{ Version, Width, Height, Timestamp int }
			if err := json.Unmarshal([]byte(line), &h); err != nil || h.Version != 2 || h.Width != 80 || h.Height != 24 || h.Timestamp == 0 {
				return "", fmt.Errorf("header %q is invalid: %w", line, err)
			}
			continue
		}
		var event [3]any
		if err := json.Unmarshal([]byte(line), &event); err != nil {
			return "", fmt.Errorf("line %d, %q, is invalid: %w", i+1, line, err)
		}
		at, isNumber := event[0].(float64)
		data, isText := event[2].(string)
		if kind := event[1]; !isNumber || !isText || at < last || kind != "o" && kind != "r" {
			return "", fmt.Errorf("line %d, %q, is not an event after %v s", i+1, line, last)
		}
		if last = at; event[1] == "o" {
			b.WriteString(data)
		}
	}
	return b.String(), nil
}

// playRecording plays a recording on a terminal, and checks that the last line appears.
func (w *world) playRecording(r recorded) error {
	cmd := exec.Command(program, "recordings", "play", "--speed", "1000", "--idle", "1ms", r.id)
	cmd.Dir, cmd.Env = w.home, append(append([]string{}, w.env...), "TERM=xterm-256color")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		return err
	}
	defer tty.Close()
	stuck := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer stuck.Stop()
	out, err := io.ReadAll(tty)
	if errors.Is(err, syscall.EIO) { // the program has closed its terminal
		err = nil
	}
	if err = errors.Join(err, cmd.Wait()); err != nil {
		return fmt.Errorf("play: %w: %.500q", err, out)
	}
	if want := fmt.Sprintf("line-%d.", r.last); !strings.Contains(string(out), want) {
		return fmt.Errorf("play shows %d bytes without %s", len(out), want)
	}
	return nil
}

// await polls f until it is true or fails.
func (w *world) await(what string, f func() (bool, error)) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		if ok, err := f(); ok || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not within %v", what, patience)
		}
	}
}

// recorders returns how many tmux clients record, as the guest's tmux says.
func (w *world) recorders() (int, error) {
	out, err := w.inGuest("repo", `tmux list-clients -F "#{client_control_mode}"`)
	return strings.Count(out, "1"), err
}

// record opens a session that records its window, prints in it, kills the keeper and starts the next one. kill is
// in the environment of the first keeper; interrupt is called while output flows, and returns whether the keeper
// was killed. damage changes the files then.
func (w *world) record(kill []string, interrupt func() bool, damage func() error) (came bool, err error) {
	w.write(".config/agent-sessionizer/config.yaml", "profiles: {recorded: {record: on}}\nprofile: recorded\nrecordings: {size: 1MiB}\n")
	if _, err := w.run(kill, "agent-sessionizer", "open", "-d", "--cpus", "1", "--memory", "512M", "--disk", "4G", "./repo"); err != nil {
		return false, err
	}
	w.write("print.sh", printing)
	w.begin()
	if _, err := w.inGuest("repo", `tmux has-session -t agent || tmux -f /dev/null new-session -d -s agent -x 80 -y 24 "exec sh `+filepath.Join(w.home, "print.sh")+`"`); err != nil {
		return false, err
	}
	came = interrupt()
	w.finish()
	if err := damage(); err != nil {
		return came, err
	}
	// This also starts the next keeper.
	before, err := w.readRecording()
	if err != nil {
		return came, fmt.Errorf("after the kill: %w", err)
	}
	if len(before.gaps) > 0 {
		return came, fmt.Errorf("the recording so far = %+v, want no gaps", before)
	}
	if before.last > 0 {
		if err := w.playRecording(before); err != nil {
			return came, err
		}
	}
	var after recorded
	if err := w.await("the recording goes on", func() (bool, error) {
		after, err = w.readRecording()
		return after.last > before.last+1000, err
	}); err != nil {
		return came, err
	}
	if before.id != "" && after.id != before.id || len(after.gaps) > 0 {
		return came, fmt.Errorf("the recording = %+v, later = %+v, want the same without gaps", before, after)
	}
	if err := w.playRecording(after); err != nil {
		return came, err
	}
	if err := w.await("one client records", func() (bool, error) { n, err := w.recorders(); return n == 1, err }); err != nil {
		return came, err
	}
	w.write(".config/agent-sessionizer/config.yaml", "recordings: {size: 1MiB}\n")
	if err := w.await("no client records", func() (bool, error) { n, err := w.recorders(); return n == 0, err }); err != nil {
		return came, err
	}
	size, err := w.run(nil, "sh", "-c", "cat .local/state/agent-sessionizer/recordings/*/* | wc -c")
	if n, aerr := strconv.Atoi(strings.TrimSpace(size)); err != nil || aerr != nil || n > 3<<19 {
		return came, fmt.Errorf("size of the recording = %s, %w, want about 1 MiB", size, errors.Join(err, aerr))
	}
	if _, err := w.run(nil, "agent-sessionizer", "destroy", "--force", "repo"); err != nil {
		return came, err
	}
	end, err := w.readRecording()
	if err == nil {
		err = w.playRecording(end)
	}
	return came, err
}

// reportRecording counts the result of an interrupted recording.
func reportRecording(t *testing.T, w *world, what string, err error) {
	t.Helper()
	injected.Add(1)
	if err != nil {
		lost.Add(1)
		log, _ := w.run(nil, "sh", "-c", "ls -la .local/state/agent-sessionizer/recordings/*; tail -n 20 .local/state/agent-sessionizer/sessions/*/keeper.log")
		t.Errorf("%s = %v, want nil\n%s", what, err, log)
		return // with its session
	}
	if left := w.leftovers(); len(left) > 0 {
		leaked.Add(1)
		t.Errorf("%s: leftovers = %v, want none", what, left)
	}
}

func none() error { return nil }

// TestRecordingKilled kills a keeper where it writes a recording. The recording can be played, and the next keeper
// continues it.
func TestRecordingKilled(t *testing.T) {
	w := newWorld(t)
	defer w.remove()
	told := filepath.Join(w.home, "marks")
	var begun, finished map[string]int
	w.begin = func() { begun = countMarks(t, told) }
	w.finish = func() { finished = countMarks(t, told) }
	if _, err := w.record([]string{"AGENT_SESSIONIZER_CRASH=:::tell:" + told}, func() bool {
		w.wait("a recording with several parts", func() bool { r, err := w.readRecording(); return err != nil || r.parts > 3 })
		return false
	}, none); err != nil {
		t.Fatalf("recording, undisturbed = %v, want nil", err)
	}
	var places []place
	// A part's creation and first writes are at the beginning; later writes are tried here and there. Nothing is
	// written between the mark after a write and the one before the next, so each of both is tried in turns.
	from, end := begun["keeper "+files[0]], finished["keeper "+files[0]]
	for i, n := 0, from; n <= end; i++ {
		places = append(places, place{files[i%2], n})
		if n += min(every(1), 4); n > from+12 {
			n += (end - from) / some(8)
		}
	}
	atEach(t, places, func(w *world, p place) (bool, error) {
		stop := w.breakAt("keeper", p.mark, p.n, nil)
		return w.record([]string{stop.env}, func() bool {
			// How many writes a keeper needs differs a little.
			for end := time.Now().Add(30 * time.Second); !stop.came() && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			}
			return stop.came()
		}, none)
	}, func(w *world, p place, err error) {
		reportRecording(t, w, fmt.Sprintf("keeper killed at %s %d", p.mark, p.n), err)
	})
}

// TestRecordingKilledAtMoments kills the keeper at moments while output flows. In every second world, the last line
// of the newest part is then cut off in the middle, as by a kill in the middle of a write.
func TestRecordingKilledAtMoments(t *testing.T) {
	moments := some(12)
	eachAtOnce(moments, func(i int) {
		w := newWorld(t)
		defer w.remove()
		at := 4 * time.Second * time.Duration(i) / time.Duration(moments)
		damage := none
		if i%2 == 0 {
			damage = w.cutRecording
		}
		_, err := w.record(nil, func() bool {
			time.Sleep(at) // the moment under test
			injured := w.signal(syscall.SIGKILL, isSessionKeeper)
			w.wait("the keeper to end", func() bool { return w.signal(0, isSessionKeeper) == 0 })
			return injured > 0
		}, damage)
		reportRecording(t, w, fmt.Sprintf("keeper killed after %v of output", at), err)
	})
}

// cutRecording removes the end of the last line of each file of the newest part.
func (w *world) cutRecording() error {
	for _, ext := range []string{".cast", ".txt"} {
		all, err := filepath.Glob(filepath.Join(w.state(), "agent-sessionizer/recordings/*/*"+ext))
		if err != nil {
			return err
		}
		newest, changed := "", time.Time{}
		for _, path := range all {
			if st, err := os.Stat(path); err == nil && st.Size() > 3 && st.ModTime().After(changed) {
				newest, changed = path, st.ModTime()
			}
		}
		if newest == "" {
			continue
		}
		st, err := os.Stat(newest)
		if err != nil {
			return err
		}
		if err := os.Truncate(newest, st.Size()-3); err != nil {
			return err
		}
	}
	return nil
}
