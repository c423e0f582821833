package console

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// The states of a Step.
const (
	Start    = "start"
	Progress = "progress"
	Done     = "done"
	Failed   = "failed"
	Skip     = "skip"
)

// Step is an update about one step of a long operation.
type Step struct {
	Name    string
	State   string        // Start, Progress, Done, Failed or Skip
	Detail  string        // what the step is doing, or why it failed or was skipped
	Elapsed time.Duration // 0 means measured here, from Start
}

// StepView shows steps. On a terminal, each running step has a line with a spinner and its
// elapsed time, redrawn in place. Otherwise each step prints one line when it ends, and
// long steps print one now and then. It is safe for concurrent use.
type StepView struct {
	c    *Console
	now  func() time.Time
	stop chan struct{}
	done chan struct{}

	mu      sync.Mutex
	running []*running // in the order they started
	drawn   int        // number of lines on the screen that will be redrawn
	frame   int
	closed  bool
}

type running struct {
	name, detail string
	began        time.Time
	reportedAt   time.Time // when the last plain line about it was written
}

const (
	frameTime = 100 * time.Millisecond
	// Without a terminal, a step is first reported after longStep, and then every
	// tellEvery.
	longStep  = 10 * time.Second
	tellEvery = 15 * time.Second
)

// Steps starts a view on the message stream. The caller must close it.
func (c *Console) Steps() *StepView {
	v := &StepView{c: c, now: time.Now, stop: make(chan struct{}), done: make(chan struct{})}
	go v.spin()
	return v
}

func (v *StepView) spin() {
	defer close(v.done)
	tick := time.NewTicker(frameTime)
	defer tick.Stop()
	for {
		select {
		case <-v.stop:
			return
		case <-tick.C:
			v.mu.Lock()
			v.frame++
			if v.c.width == nil {
				v.reportSlowSteps()
			} else if len(v.running) > 0 {
				v.redraw("")
			}
			v.mu.Unlock()
		}
	}
}

// Update shows an update about a step. A step that ends without having started is shown,
// too.
func (v *StepView) Update(s Step) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return
	}
	s.Name, s.Detail = termtext.Line(s.Name), termtext.Line(s.Detail)
	i := v.indexOf(s.Name)
	switch s.State {
	case Start, Progress:
		if i < 0 {
			v.running = append(v.running, &running{name: s.Name, began: v.now().Add(-s.Elapsed)})
			i = len(v.running) - 1
		}
		v.running[i].detail = s.Detail
		v.redraw("")
	default:
		if i >= 0 {
			if s.Elapsed == 0 {
				s.Elapsed = v.now().Sub(v.running[i].began)
			}
			v.running = append(v.running[:i], v.running[i+1:]...)
		}
		v.redraw(v.endLine(s) + "\n")
	}
}

// reportSlowSteps writes a plain line for each long-running step that is due for one.
func (v *StepView) reportSlowSteps() {
	for _, r := range v.running {
		now := v.now()
		if now.Sub(r.began) < longStep || now.Sub(r.reportedAt) < tellEvery {
			continue
		}
		r.reportedAt = now
		line := "… " + r.name
		if r.detail != "" {
			line += ": " + r.detail
		}
		_, _ = io.WriteString(v.c.Err, line+"  "+seconds(now.Sub(r.began))+"\n")
	}
}

func (v *StepView) indexOf(name string) int {
	for i, r := range v.running {
		if r.name == name {
			return i
		}
	}
	return -1
}

// endLine returns the final line of a step.
func (v *StepView) endLine(s Step) string {
	on := v.c.color.err
	mark := paint(on, Good, "✓")
	switch s.State {
	case Failed:
		mark = paint(on, Bad, "✗")
	case Skip:
		mark = paint(on, Faint, "–")
	}
	line := mark + " " + s.Name
	if s.State != Skip {
		line += "  " + paint(on, Faint, seconds(s.Elapsed))
	}
	if s.Detail != "" && s.State != Done {
		line += "  " + s.Detail
	}
	return line
}

// redraw replaces the lines drawn before: it writes above, which stays, and the running
// steps below it. Without a terminal it writes only above.
func (v *StepView) redraw(above string) {
	if v.c.width == nil {
		_, _ = io.WriteString(v.c.Err, above)
		return
	}
	width := v.c.width()
	var b strings.Builder
	if v.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", v.drawn)
	}
	b.WriteString("\r\x1b[J" + above)
	for _, r := range v.running {
		line := fmt.Sprintf("%c %s  %s", spinner[v.frame%len(spinner)], r.name, seconds(v.now().Sub(r.began)))
		if r.detail != "" {
			line += "  " + r.detail
		}
		// Each step must fit on one line, or the next redraw would move up too few lines.
		b.WriteString(fit(line, width-1) + "\n")
	}
	v.drawn = len(v.running)
	_, _ = io.WriteString(v.c.screen.err, b.String())
}

var spinner = []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")

// Say writes a line to the message stream, above the running steps.
func (v *StepView) Say(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.redraw(termtext.Line(fmt.Sprintf(format, args...)) + "\n")
}

// Close removes the running steps from the screen. Steps that have not ended leave no line;
// the caller reports what became of them.
func (v *StepView) Close() {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return
	}
	v.closed = true
	close(v.stop)
	v.running = nil
	if v.drawn > 0 {
		v.redraw("")
	}
	v.mu.Unlock()
	<-v.done
}

// seconds formats a duration for people: 0.4s, 12.3s, 2m05s, 1h02m.
func seconds(d time.Duration) string {
	switch {
	case d < time.Minute-50*time.Millisecond:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		d = d.Round(time.Second)
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	d = d.Round(time.Minute)
	return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
}
