package fake

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// fault is the fault of one operation; the package comment explains the fields.
type fault struct {
	Error     string    `json:"error"`
	Code      fail.Code `json:"code"`
	Hint      string    `json:"hint"`
	Stall     string    `json:"stall"`
	Match     string    `json:"match"`
	Count     int       `json:"count"`
	After     int       `json:"after"`
	Never     bool      `json:"never"`
	Panic     bool      `json:"panic"`
	DropAfter int64     `json:"drop_after"`
	Die       bool      `json:"die"`
	Freeze    bool      `json:"freeze"`
}

// script is the whole file.
type script struct {
	Create     fault  `json:"create"`
	Start      fault  `json:"start"`
	Stop       fault  `json:"stop"`
	Delete     fault  `json:"delete"`
	Inspect    fault  `json:"inspect"`
	List       fault  `json:"list"`
	Check      fault  `json:"check"`
	Accel      fault  `json:"accel"`
	Ready      fault  `json:"ready"`
	Exec       fault  `json:"exec"`
	Connect    fault  `json:"connect"`
	Export     fault  `json:"export"`
	Save       fault  `json:"save"`
	Wake       fault  `json:"wake"`
	Checkpoint fault  `json:"checkpoint"`
	Disk       fault  `json:"disk"`
	Suspend    fault  `json:"suspend"`
	Restore    fault  `json:"restore"`
	Fork       fault  `json:"fork"`
	KillSelfAt string `json:"kill_self_at"`
	Emulate    bool   `json:"emulate"`
}

func (s script) op(name string) fault {
	return map[string]fault{
		"create": s.Create, "start": s.Start, "stop": s.Stop, "delete": s.Delete, "inspect": s.Inspect,
		"list": s.List, "check": s.Check, "accel": s.Accel, "ready": s.Ready, "exec": s.Exec, "connect": s.Connect,
		"export": s.Export, "save": s.Save, "wake": s.Wake, "checkpoint": s.Checkpoint, "disk": s.Disk, "suspend": s.Suspend, "restore": s.Restore, "fork": s.Fork,
	}[name]
}

type faults struct{ path string }

// read returns the script and the hash under which its uses are counted. Without a
// file no fault occurs.
func (f faults) read() (script, string, error) {
	var s script
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, "", nil
	}
	if err != nil {
		return s, "", fmt.Errorf("read faults: %w", err)
	}
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.DisallowUnknownFields() // a test with a misspelt fault would prove nothing
	if err := d.Decode(&s); err != nil {
		return s, "", fmt.Errorf("read faults: %s: %w", f.path, err)
	}
	sum := sha256.Sum256(b)
	return s, hex.EncodeToString(sum[:8]), nil
}

// at returns the fault that op on subject has now, or the zero fault for none.
func (f faults) at(op, subject string) (fault, script, error) {
	s, sum, err := f.read()
	if err != nil {
		return fault{}, s, err
	}
	x := s.op(op)
	if x == (fault{}) || !strings.Contains(subject, x.Match) {
		return fault{}, s, nil
	}
	if x.Count > 0 || x.After > 0 {
		n, err := f.times(sum, op)
		if err != nil {
			return fault{}, s, err
		}
		if n <= x.After || x.Count > 0 && n > x.After+x.Count {
			return fault{}, s, nil
		}
	}
	return x, s, nil
}

// times counts one more use of op's fault, across processes.
func (f faults) times(sum, op string) (int, error) {
	file, err := os.OpenFile(f.path+".used", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return 0, fmt.Errorf("count a fault: %w", err)
	}
	defer file.Close()
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		return 0, fmt.Errorf("count a fault: %w", err)
	}
	var state struct {
		Sum  string         `json:"sum"`
		Used map[string]int `json:"used"`
	}
	// An empty or unreadable file counts from zero, as does a changed script.
	if err := json.NewDecoder(file).Decode(&state); err != nil || state.Sum != sum {
		state.Sum, state.Used = sum, map[string]int{}
	}
	state.Used[op]++
	b, err := json.Marshal(state)
	if err != nil {
		return 0, fmt.Errorf("count a fault: %w", err)
	}
	if err := file.Truncate(0); err != nil {
		return 0, fmt.Errorf("count a fault: %w", err)
	}
	if _, err := file.WriteAt(b, 0); err != nil {
		return 0, fmt.Errorf("count a fault: %w", err)
	}
	return state.Used[op], nil
}

// around does the work of op, with its fault.
func (f faults) around(ctx context.Context, op, subject string, work func() error) error {
	x, s, err := f.at(op, subject)
	if err != nil {
		return err
	}
	killSelf(s.KillSelfAt == op+":before")
	if err := x.happen(ctx); err != nil {
		return fmt.Errorf("%s %s: %w", op, subject, err)
	}
	if x.Panic {
		return fmt.Errorf("%s %s: %w", op, subject, vm.ErrPanicked)
	}
	err = work()
	killSelf(s.KillSelfAt == op+":after")
	return err
}

// happen stalls and fails as the fault says.
func (x fault) happen(ctx context.Context) error {
	if x.Stall != "" {
		d, err := time.ParseDuration(x.Stall)
		if err != nil {
			return fmt.Errorf("faults: stall: %w", err)
		}
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if x.Error == "" {
		return nil
	}
	code := x.Code
	if code == 0 {
		code = fail.Failure
	}
	return fail.New(code, "%s", x.Error).WithHint("%s", x.Hint)
}

// killSelf simulates a crash: no deferred call runs, no file is flushed.
func killSelf(now bool) {
	if now {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the signal is delivered
	}
}
