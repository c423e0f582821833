package screen

import (
	"context"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
)

// owner knows the functions that run outside of the model, so that the review ends after them.
type owner struct {
	mu      sync.Mutex
	stopped bool
	running sync.WaitGroup
}

// run calls f, unless the review has ended.
func (o *owner) run(f func() tea.Msg) tea.Msg {
	o.mu.Lock()
	if o.stopped {
		o.mu.Unlock()
		return nil
	}
	o.running.Add(1)
	o.mu.Unlock()
	defer o.running.Done()
	return f()
}

// wait prevents functions from starting, and returns after those that run.
func (o *owner) wait() {
	o.mu.Lock()
	o.stopped = true
	o.mu.Unlock()
	o.running.Wait()
}

// latest runs one function at a time. A newer one cancels it, waits for it, and replaces one that
// waits: however fast the user moves through files, one patch is read.
type latest struct {
	owner   *owner
	running bool
	cancel  context.CancelFunc // of the one that runs
	next    tea.Cmd
	skip    context.CancelFunc // of next
}

// start runs f, which must return a message for which the model calls end.
func (l *latest) start(ctx context.Context, f func(context.Context) tea.Msg) tea.Cmd {
	ctx, cancel := context.WithCancel(ctx)
	cmd := func() tea.Msg { return l.owner.run(func() tea.Msg { return f(ctx) }) }
	if !l.running {
		l.running, l.cancel = true, cancel
		return cmd
	}
	l.cancel()
	if l.skip != nil {
		l.skip()
	}
	l.next, l.skip = cmd, cancel
	return nil
}

// end returns the function that waited, if any.
func (l *latest) end() tea.Cmd {
	l.cancel()
	cmd := l.next
	l.running, l.cancel = cmd != nil, l.skip
	l.next, l.skip = nil, nil
	return cmd
}

// job is work for which the user waits, such as a landing. Marks do not change meanwhile.
type job struct {
	what    string
	cancel  context.CancelFunc
	seconds int
}

// tickMsg says that a job has run for another second.
type tickMsg struct{ job *job }

func tick(j *job) tea.Cmd {
	return tea.Tick(time.Second, func(time.Time) tea.Msg { return tickMsg{j} })
}

// doneMsg is the end of a job.
type doneMsg struct {
	err  error
	then func(*model) tea.Cmd // what follows a success
}

// start runs a job, which the user can cancel. Only one runs at a time.
func (m *model) start(what string, do func(ctx context.Context) (func(*model) tea.Cmd, error)) tea.Cmd {
	ctx, cancel := context.WithCancel(m.ctx)
	j := &job{what: what, cancel: cancel}
	m.busy, m.message = j, ""
	return tea.Batch(m.tick(j), func() tea.Msg {
		return m.owner.run(func() tea.Msg {
			then, err := do(ctx)
			return doneMsg{err, then}
		})
	})
}

// done ends a job.
func (m *model) done(msg doneMsg) tea.Cmd {
	if m.busy != nil {
		m.busy.cancel()
		m.busy = nil
	}
	m.message, m.problem = "", false
	m.follow()
	var next tea.Cmd
	if msg.err != nil {
		m.complain(msg.err)
	} else if msg.then != nil {
		next = msg.then(m)
	}
	if m.quit && m.busy == nil {
		if m.ask == nil && !m.problem {
			return tea.Quit
		}
		m.quit = false // the user must see this first
	}
	return tea.Batch(next, m.load())
}
