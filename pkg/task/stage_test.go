package task

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// staging returns a task in phase Staging. Git fails to reach its repository the
// first unreachable times. The remote is a directory of this host; no network is
// used.
func staging(t *testing.T, text string, unreachable int) (*Worker, Task) {
	t.Helper()
	m := newManager(t, 1, 100)
	remote := filepath.Join(t.TempDir(), "remote.git")
	git, err := exec.LookPath("git")
	if err != nil {
		t.Fatal(err)
	}
	script := "set -e; git init -q -b main $1; cd $1; mkdir -p dir/sub; echo 1 >dir/sub/file; ln -s dir link; git add -A; git -c user.name=a -c user.email=a@localhost.invalid commit -qm base"
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", remote).CombinedOutput(); err != nil {
		t.Fatalf("create the repository: %v\n%s", err, out)
	}
	bin := t.TempDir()
	wrapper := fmt.Sprintf(`#!/bin/sh
case " $* " in
*" ls-remote "*)
	echo x >>%[1]s/asked
	[ $(wc -l <%[1]s/asked) -gt %[2]d ] || { echo "fatal: unable to access: Failed to connect to github.com" >&2; exit 128; } ;;
esac
exec %[3]s -c url.%[4]s.insteadOf=https://github.com/acme/app.git "$@"
`, bin, unreachable, git, remote)
	if err := os.WriteFile(filepath.Join(bin, "git"), []byte(wrapper), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	asked, _, err := manifest.Parse("m", []byte(text), "")
	if err != nil {
		t.Fatal(err)
	}
	task, _, err := m.Submit(t.Context(), asked, Submission{Text: []byte(text)})
	if err != nil {
		t.Fatal(err)
	}
	if got := started(t, m); len(got) != 1 {
		t.Fatalf("tasks started = %q, want 1", got)
	}
	if task, err = m.Get(t.Context(), task.ID); err != nil {
		t.Fatal(err)
	}
	w := NewWorker(m, &repo.Mirrors{Dir: m.paths().Mirrors()}, slog.New(slog.DiscardHandler), secret.NewRedactor())
	return w, task
}

const stageManifest = "version: \"1\"\nkind: Task\nrepository:\n  url: acme/app\n  subpath: %s\nagent: {kind: command, command: [\"true\"]}\nlifecycle: {retries: {clone: %d}}\n"

// Each retry of a clone is an event, and there are as many as the manifest says.
func TestRetriesOfAClone(t *testing.T) {
	for _, c := range []struct {
		unreachable, retries, events int
		ok                           bool
	}{{0, 3, 0, true}, {2, 3, 2, true}, {9, 2, 2, false}, {1, 0, 0, false}} {
		t.Run(fmt.Sprintf("%d of %d", c.unreachable, c.retries), func(t *testing.T) {
			w, task := staging(t, fmt.Sprintf(stageManifest, "dir", c.retries), c.unreachable)
			synctest.Test(t, func(t *testing.T) {
				err := w.stage(t.Context(), &task)
				if (err == nil) != c.ok || (task.Phase == Provisioning) != c.ok {
					t.Errorf("stage = %v, phase %s, want success: %t", err, task.Phase, c.ok)
				}
			})
			all := kinds(t, w.Tasks, task.ID)[EventRetry]
			if len(all) != c.events {
				t.Errorf("%s events = %d, want %d", EventRetry, len(all), c.events)
			}
			for i, ev := range all {
				var r Retrying
				if err := json.Unmarshal(ev.Data, &r); err != nil || r.Try != i+2 || r.Most != c.retries+1 || !strings.Contains(r.Error, "Failed to connect") {
					t.Errorf("%s event %d = %s, %v, want try %d of %d with \"Failed to connect\"", EventRetry, i, ev.Data, err, i+2, c.retries+1)
				}
				if base := int64(5000) << i; r.DelayMS < base*84/100 || r.DelayMS > base*116/100 {
					t.Errorf("delay of retry %d = %d ms, want about %d", i, r.DelayMS, base)
				}
			}
		})
	}
}

// A directory that the commit lacks is detected before a VM is created, and reported
// with its line.
func TestSubpathThatIsNotThere(t *testing.T) {
	for sub, is := range map[string]bool{
		"dir": true, "dir/sub": true, "./dir//sub/": true, "link": true, "link/sub": true,
		"nosuch": false, "dir/nosuch": false, "dir/sub/file": false, "d*": false, "dir/sub/file/x": false,
	} {
		t.Run(strings.ReplaceAll(sub, "/", "_"), func(t *testing.T) {
			w, task := staging(t, fmt.Sprintf(stageManifest, sub, 0), 0)
			err := w.stage(t.Context(), &task)
			switch {
			case is:
				if err != nil || task.Phase != Provisioning {
					t.Errorf("stage with an existing subpath = %v, phase %s, want nil, %s", err, task.Phase, Provisioning)
				}
			case fail.CodeOf(err) != fail.NotFound || !strings.Contains(err.Error(), "manifest.yaml:5:12: repository.subpath is refused: ") || fail.HintOf(err) == "" || task.Phase != Staging:
				t.Errorf("stage with a missing subpath = %v (hint %q), phase %s, want code %v at manifest.yaml:5:12 with a hint, %s", err, fail.HintOf(err), task.Phase, fail.NotFound, Staging)
			}
		})
	}
}

// A host without a lease does not work on its tasks of the cluster, and goes on when it has one.
func TestNoStepWithoutALease(t *testing.T) {
	w, task := staging(t, fmt.Sprintf(stageManifest, "dir", 0), 0)
	s := w.Tasks.store()
	incarnation, err := s.Incarnation(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	row, err := s.Task(t.Context(), task.ID)
	if err != nil {
		t.Fatal(err)
	}
	row.ID, row.Host = "00000000000a", store.Waiting
	if err := s.Replicate(t.Context(), []store.Replica{{Task: row, Newest: 1, Revision: 5, Fence: 5}}, 5); err != nil {
		t.Fatal(err)
	}
	claimed, err := w.Tasks.Get(t.Context(), row.ID)
	if err != nil {
		t.Fatal(err)
	}
	if after, err := w.Next(t.Context(), claimed); !errors.Is(err, store.ErrFenced) || after.Phase != Staging {
		t.Errorf("Next without a lease = %s, %v, want STAGING and ErrFenced", after.Phase, err)
	}
	if err := s.SetLease(t.Context(), incarnation, bootclock.Now()+time.Hour); err != nil {
		t.Fatal(err)
	}
	if after, err := w.Next(t.Context(), claimed); err != nil || after.Phase != Provisioning {
		t.Errorf("Next with a lease = %s, %v, want PROVISIONING", after.Phase, err)
	}
}
