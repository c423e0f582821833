package task

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

const (
	// maxLog limits each log on the host, over all attempts. Further output of an
	// agent stays in its VM and is lost with it.
	maxLog = 1 << 30

	// saveEvery is the minimum interval between writes of the output's state to the
	// store.
	saveEvery = time.Second

	// eventRate and eventBurst limit the events that an agent's output causes.
	eventRate, eventBurst = 20, 2000

	heartbeatEvery = 30 * time.Second
)

// outputCollector records a running agent's output: it holds the logs, the parser, and the times
// of the last signs of life.
type outputCollector struct {
	rec    *recorder
	dir    Dir
	from   Offsets // where this attempt's output begins in the logs
	most   int64   // bytes of each log
	result guestproto.TaskResult

	mu       sync.Mutex
	task     Task
	logs     [2]*os.File
	lengths  [2]int64
	full     [2]bool // whether a log had to be cut
	parser   *agent.Parser
	vital    *liveness
	news     []store.Event
	rate     *rate.Limiter
	left     int   // events that the rate limit dropped
	cpu      int64 // milliseconds
	memory   int64 // bytes
	beatTold time.Time
	saved    time.Time

	recording *recording.Log // nil if the output is not recorded
}

// newCollector opens the logs, and parses again what the previous keeper had written to
// them and not counted.
func (rec *recorder) newCollector(ctx context.Context, t *Task) (_ *outputCollector, err error) {
	d := rec.tasks.Dir(t.ID)
	now := time.Now()
	r := &outputCollector{
		rec: rec, dir: d, from: t.Status.LogBase, most: maxLog, task: *t, parser: agent.NewParser(t.Manifest.Agent.Kind, t.Status.Progress),
		vital: newLiveness(t.Manifest.Lifecycle, t.Status.Quiet, now), rate: rate.NewLimiter(eventRate, eventBurst), saved: now, beatTold: now,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.closeLogs())
		}
	}()
	r.openRecording(t)
	for i, path := range []string{d.Stdout(), d.Stderr()} {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fail.New(fail.Host, "open task log: %w", err)
		}
		r.logs[i] = f
		if r.lengths[i], err = f.Seek(0, io.SeekEnd); err != nil {
			return nil, fail.New(fail.Host, "open task log: %w", err)
		}
	}
	parsed := t.Status.Progress.Offset
	if r.lengths[0] < parsed {
		return r, nil // the host lost the end of the log in a power cut; the guest sends it again, and it is counted already
	}
	if _, err := r.logs[0].Seek(parsed, io.SeekStart); err != nil {
		return nil, err
	}
	again := bufio.NewReaderSize(io.LimitReader(r.logs[0], r.lengths[0]-parsed), 64<<10)
	buf := make([]byte, 64<<10)
	for {
		n, err := again.Read(buf)
		r.parse(buf[:n])
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := r.save(ctx, false); err != nil {
			return nil, err
		}
	}
	_, err = r.logs[0].Seek(0, io.SeekEnd)
	return r, err
}

// collectUntilExit receives output over one connection to the guest, until the agent ends.
func (r *outputCollector) collectUntilExit(ctx context.Context, g guestclient.Guest) error {
	values, err := g.Secrets(ctx)
	if err != nil {
		return err
	}
	r.rec.Redact.SetGuest(values...)
	for again := 0; ; again++ {
		err := r.watch(ctx, g)
		if !errors.Is(err, guestclient.ErrTruncated) {
			return err
		}
		cut, cerr := r.continueCut(ctx, g)
		if cerr != nil || !cut && again > 2 { // a file may have grown again meanwhile
			return errors.Join(err, cerr)
		}
		if err := sleep(ctx, followEvery); err != nil {
			return err
		}
	}
}

// continueCut continues the logs with what an agent has written since it truncated its own output, as
// "echo x >/dev/stderr" does: its output is a file. It reports whether one is shorter than what was read.
func (r *outputCollector) continueCut(ctx context.Context, g guestclient.Guest) (cut bool, err error) {
	st, err := g.Task(r.task.ID, r.task.Status.Attempt).Status(ctx)
	if err != nil {
		return false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lengths[0]-r.from.Stdout > st.Stdout {
		r.from.Stdout, cut = r.lengths[0], true
	}
	if r.lengths[1]-r.from.Stderr > st.Stderr {
		r.from.Stderr, cut = r.lengths[1], true
	}
	if !cut {
		return false, nil
	}
	return true, r.rec.update(ctx, &r.task, func(_ *store.Task, status *Status) []store.Event {
		status.LogBase = r.from
		return status.Events.Admit(store.NewEvent(EventWarning, lifecycle.Warning{
			Message: "the agent truncated its own output, as by writing to /dev/stderr; some of it may be missing from the logs",
			Hint:    "write to it with >>/dev/stderr or >&2",
		}))
	})
}

// watch receives output until the agent ends.
func (r *outputCollector) watch(ctx context.Context, g guestclient.Guest) error {
	var masks [2]*secret.Writer
	for i := range masks {
		masks[i] = r.rec.Redact.Mask(logWriter{r, i})
	}
	r.mu.Lock()
	task, out, errs := r.task, r.lengths[0], r.lengths[1]
	r.mu.Unlock()
	from := guestclient.TaskOffsets{Stdout: max(0, out-r.from.Stdout), Stderr: max(0, errs-r.from.Stderr)}
	from.Max = max(r.most-min(r.from.Stdout, r.from.Stderr), 1) // what the emptier log can take; recordOutput cuts the other one
	err := g.Task(task.ID, task.Status.Attempt).Watch(ctx, from, func(f guestclient.TaskFrame) error {
		if f.Status != nil {
			return r.recordStatus(ctx, *f.Status)
		}
		i := 0
		if f.Stderr {
			i = 1
		}
		_, err := masks[i].Write(f.Data)
		return err
	})
	if err != nil {
		return err // output that the masks hold back may begin a secret; it is requested again
	}
	return errors.Join(masks[0].Close(), masks[1].Close())
}

// logWriter writes to one of the logs.
type logWriter struct {
	r *outputCollector
	i int
}

func (l logWriter) Write(p []byte) (int, error) {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	return len(p), l.r.recordOutput(l.i, p)
}

// recordOutput writes output to its log and counts it.
func (r *outputCollector) recordOutput(i int, p []byte) error {
	now := time.Now()
	r.vital.markOutput(now)
	if room := max(r.most-r.lengths[i], 0); int64(len(p)) > room {
		p = p[:room]
		if !r.full[i] {
			r.full[i] = true
			name := filepath.Base([]string{r.dir.Stdout(), r.dir.Stderr()}[i])
			r.news = append(r.news, store.NewEvent(EventWarning, lifecycle.Warning{
				Message: fmt.Sprintf("%s reached its limit of %d bytes; further output of the agent stays in its VM", name, r.most),
			}))
		}
	}
	crash.Here(crash.BeforeFile)
	n, err := r.logs[i].WriteAt(p, r.lengths[i])
	crash.Here(crash.AfterFile)
	r.lengths[i] += int64(n)
	if err != nil {
		return fail.New(fail.Host, "write task log: %w", err)
	}
	r.record(p)
	if i == 0 {
		r.parse(p)
	}
	return r.saveLocked(context.Background(), false)
}

// openRecording begins to record the output as a terminal would show it, if the settings ask for it.
func (r *outputCollector) openRecording(t *Task) {
	if set := r.rec.tasks.Sessions.Config.Recordings; set.Tasks == config.On {
		r.recording = recording.NewLog(&recording.Recorder{
			Dir:   recording.Store{Dir: r.rec.tasks.paths().Recordings()}.Subject(t.ID),
			Limit: int64(set.Size), Redact: r.rec.Redact,
		}, 0, string(t.Manifest.Agent.Kind))
	}
}

// record records output. The task does not depend on its recording: after an error it continues without.
func (r *outputCollector) record(p []byte) {
	if r.recording == nil {
		return
	}
	if _, err := r.recording.Write(p); err != nil {
		r.rec.Log.Warn("failed to record the output", "error", err)
		r.recording = nil
	}
}

// parse feeds stdout to the parser, and turns its results into events.
func (r *outputCollector) parse(p []byte) {
	for _, c := range r.parser.Feed(p) {
		r.vital.markProgress(time.Now())
		if !r.rate.Allow() {
			r.left++
			continue
		}
		c.Name, c.Text = r.rec.Text(c.Name), r.rec.Text(c.Text)
		r.news = append(r.news, store.NewEvent(c.Kind, c))
	}
}

// recordStatus records the agent's status as the guest reports it.
func (r *outputCollector) recordStatus(ctx context.Context, s guestproto.TaskStatus) error {
	switch s.State {
	case guestproto.TaskLost, guestproto.TaskNone:
		return errAgentLost
	case guestproto.TaskExited:
		r.result = *s.Result
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cpu, r.memory = s.CPU, s.Memory
	r.vital.markCPU(time.Now(), s.CPU)
	return r.saveLocked(ctx, false)
}

// watchLiveness looks for signs that the agent is stuck. It ends the watching when the agent
// counts as hung.
func (r *outputCollector) watchLiveness(ctx context.Context, cancel context.CancelCauseFunc, life manifest.Lifecycle) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		waiting, err := r.rec.Store.Questions(ctx, r.task.SessionID, false)
		if err != nil && ctx.Err() == nil {
			r.rec.Log.WarnContext(ctx, "failed to read questions", "error", err) // the agent may count as hung
		}
		r.mu.Lock()
		if len(waiting) > 0 {
			r.vital.pause(time.Now())
		}
		news, hung := r.vital.check(time.Now())
		for _, h := range news {
			if h.Sign == signTimeout {
				h.Action = life.HangAction
			}
			r.news = append(r.news, store.NewEvent(EventHang, h))
		}
		err = r.saveLocked(ctx, len(news) > 0)
		r.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			r.rec.Log.ErrorContext(ctx, "failed to record agent progress", "error", err) // the next save writes it all, or fails loudly
		}
		if hung && life.HangAction != "notify" {
			cancel(fail.New(fail.Timeout, "%w for %v", errHung, time.Duration(life.HangTimeout)))
			return
		}
	}
}

func (r *outputCollector) save(ctx context.Context, now bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.saveLocked(ctx, now)
}

// saveLocked writes new events and their position in the output to the store in one
// transaction, so that the next keeper neither repeats nor omits any.
func (r *outputCollector) saveLocked(ctx context.Context, now bool) error {
	at := time.Now()
	if !now && at.Sub(r.saved) < saveEvery && len(r.news) < 500 {
		return nil
	}
	if at.Sub(r.beatTold) >= heartbeatEvery {
		r.beatTold = at
		r.news = append(r.news, store.NewEvent(EventHeartbeat, Heartbeat{
			Stdout: r.lengths[0], Stderr: r.lengths[1], CPUMillis: r.cpu, MemoryBytes: r.memory, Usage: r.parser.Progress().Usage,
		}))
	}
	if r.left > 0 {
		r.news = append(r.news, store.NewEvent(EventWarning, lifecycle.Warning{Message: fmt.Sprintf("%d events left out: the agent produces too many", r.left)}))
	}
	progress := r.parser.Progress()
	if len(r.news) == 0 && progress.Offset == r.task.Status.Progress.Offset && at.Sub(r.saved) < heartbeatEvery {
		return nil
	}
	progress.Result, progress.Error = r.rec.Text(progress.Result), r.rec.Text(progress.Error)
	news, spent, quiet := r.news, r.rec.currentSpent(r.task.Status, at), max(0, at.Sub(r.vital.output))
	err := r.rec.update(ctx, &r.task, func(_ *store.Task, status *Status) []store.Event {
		status.Progress, status.Spent, status.Quiet = progress, spent, quiet
		return status.Events.Admit(news...)
	})
	if err != nil {
		return err
	}
	r.rec.noted = at
	r.news, r.left, r.saved = nil, 0, at
	return r.rec.writeFiles(ctx, r.task)
}

// close writes the rest.
func (r *outputCollector) close(ctx context.Context) error {
	return errors.Join(r.save(ctx, true), r.closeLogs())
}

func (r *outputCollector) closeLogs() (err error) {
	if r.recording != nil {
		if err := r.recording.Close(); err != nil {
			r.rec.Log.Warn("failed to record the output", "error", err)
		}
	}
	for _, f := range r.logs {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}
