package recording

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// TmuxCommand attaches a control client to the guest's tmux. It changes no size, and tmux drops what the
// client is 5 s late to read, instead of waiting for it. -N starts no server: without sessions it would
// end at once, together with a session that another client creates in it at that moment. The quotes are
// for zsh, which expands =NAME.
const TmuxCommand = "exec tmux -u -N -C attach-session -t '=agent' -f read-only,ignore-size,pause-after=5"

const (
	maxControlLine = 256 << 10 // bytes; tmux sends at most some kB of output at once
	maxReply       = 2 << 20   // bytes of the reply to a command
	maxPanes       = 32        // that are recorded at the same time
	maxCommands    = 256       // that the guest has not read

	// These limit what a guest makes the host process and write. An agent's screen causes some kB per second.
	bytesPerSecond = 256 << 10
	bytesAtOnce    = 64 << 20
)

// The tmux formats of a pane. The name of the window may contain spaces.
const (
	paneFormat   = "#{pane_id} #{pane_width} #{pane_height} #{window_name}"
	screenFormat = "#{pane_width} #{pane_height} #{cursor_x} #{cursor_y} #{alternate_on}"
)

// Limiter limits how fast a guest's output is recorded, over all of its connections.
func Limiter() *rate.Limiter { return rate.NewLimiter(bytesPerSecond, bytesAtOnce) }

// Control records the panes of a tmux server from what its control client prints. It reads slowly
// if there is too much; tmux then pauses the panes.
type Control struct {
	ctx   context.Context
	rec   *Recorder
	limit *rate.Limiter

	commands chan string
	line     []byte // incomplete
	panes    map[int]*pane
	asked    []request // commands without a reply, in their order
	reply    *reply    // that is being received
	listing  bool      // a list of panes was requested
	stale    bool      // and must be requested again
}

// pane is a pane of the guest's tmux.
type pane struct {
	track  *track
	title  string
	drawn  bool // the track shows the pane as it is; otherwise its output is dropped until it is captured
	asked  bool // a capture was requested
	screen screen
}

// request is a command whose reply is expected.
type request struct {
	kind requestKind
	pane int
}

type requestKind int

const (
	listPanes requestKind = iota
	readScreen
	capture
	other
)

// reply is the output of a command.
type reply struct {
	guard string // what follows %begin, and must follow %end
	ours  bool   // it belongs to one of our commands
	lines [][]byte
	size  int
}

// NewControl returns what records into rec. limit may be shared with later connections to the same guest.
func NewControl(ctx context.Context, rec *Recorder, limit *rate.Limiter) *Control {
	c := &Control{ctx: ctx, rec: rec, limit: limit, commands: make(chan string, maxCommands), panes: map[int]*pane{}}
	_ = c.list() // the first command always has room
	return c
}

// Commands returns what the control client must read as its input. It ends with the context.
func (c *Control) Commands() io.Reader { return &commandReader{ctx: c.ctx, from: c.commands} }

type commandReader struct {
	ctx  context.Context
	from chan string
	rest string
}

func (r *commandReader) Read(p []byte) (int, error) {
	if r.rest == "" {
		select {
		case r.rest = <-r.from:
		case <-r.ctx.Done():
			return 0, io.EOF
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// errCommands ends a connection to a guest that does not answer.
var errCommands = errors.New("the guest's tmux does not answer commands")

func (c *Control) send(command string, replies ...request) error {
	if len(c.asked) > maxCommands {
		return errCommands
	}
	select {
	case c.commands <- command + "\n":
		c.asked = append(c.asked, replies...)
		return nil
	default:
		return errCommands
	}
}

// Write processes output of the control client.
func (c *Control) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		size := bytes.IndexByte(p, '\n')
		if size < 0 {
			if len(c.line)+len(p) > maxControlLine {
				return 0, fmt.Errorf("the guest's tmux sent a line of more than %d bytes", maxControlLine)
			}
			c.line = append(c.line, p...)
			break
		}
		c.line = append(c.line, p[:size]...)
		line := c.line // valid until the next round
		c.line, p = c.line[:0], p[size+1:]
		if len(line) > maxControlLine {
			return 0, fmt.Errorf("the guest's tmux sent a line of more than %d bytes", maxControlLine)
		}
		if err := c.limit.WaitN(c.ctx, len(line)+1); err != nil {
			return 0, err
		}
		if err := c.process(line); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// process handles a line.
func (c *Control) process(line []byte) error {
	if c.reply != nil {
		return c.collect(line)
	}
	word, rest, _ := strings.Cut(string(line[:min(len(line), 200)]), " ")
	switch word {
	case "%output", "%extended-output":
		if number, data, ok := parseOutput(line); ok {
			return c.output(number, data)
		}
	case "%begin":
		fields := strings.Fields(rest)
		c.reply = &reply{guard: rest, ours: len(fields) == 3 && fields[2] == "1"}
	case "%pause":
		if number, ok := parsePane(rest); ok {
			return c.resume(number)
		}
	case "%window-add", "%window-close", "%window-renamed", "%layout-change", "%session-changed", "%unlinked-window-close":
		return c.list()
	}
	return nil
}

// collect adds a line to the reply that is being received, or ends it.
func (c *Control) collect(line []byte) error {
	text := string(line[:min(len(line), 200)])
	ended, failed := text == "%end "+c.reply.guard, text == "%error "+c.reply.guard
	if !ended && !failed {
		if c.reply.size += len(line) + 1; c.reply.size <= maxReply {
			c.reply.lines = append(c.reply.lines, bytes.Clone(line))
		}
		return nil
	}
	r := c.reply
	c.reply = nil
	if !r.ours || len(c.asked) == 0 {
		return nil
	}
	of := c.asked[0]
	c.asked = c.asked[1:]
	if failed {
		r.lines = nil
	}
	return c.answer(of, r.lines)
}

// answer handles the reply to a command.
func (c *Control) answer(of request, lines [][]byte) error {
	p := c.panes[of.pane]
	switch of.kind {
	case listPanes:
		c.listing = false
		if err := c.update(lines); err != nil || !c.stale {
			return err
		}
		return c.list()
	case readScreen:
		if p != nil {
			p.screen = parseScreen(lines)
		}
	case capture:
		if p == nil {
			return nil
		}
		p.asked = false
		if lines == nil || p.screen.Width == 0 { // the pane is gone
			return c.list()
		}
		p.screen.Lines, p.screen.Title = lines, p.title
		if p.drawn && p.track.clean.holds() { // half a secret may be on the screen
			if p.track.full() {
				return p.track.clear(p.screen)
			}
			return nil
		}
		p.drawn = true
		return p.track.draw(p.screen)
	}
	return nil
}

// list requests the list of panes.
func (c *Control) list() error {
	if c.listing {
		c.stale = true
		return nil
	}
	c.listing, c.stale = true, false
	return c.send("list-panes -s -F '"+paneFormat+"'", request{kind: listPanes})
}

// update makes the tracks match a list of panes.
func (c *Control) update(lines [][]byte) error {
	listed := map[int]bool{}
	for _, line := range lines {
		fields := strings.SplitN(string(line), " ", 4)
		if len(fields) != 4 {
			continue
		}
		number, ok := parsePane(fields[0])
		if !ok || len(listed) == maxPanes {
			continue
		}
		listed[number] = true
		p := c.panes[number]
		if p == nil {
			p = &pane{track: c.rec.track(number)}
			c.panes[number] = p
		}
		p.title = termtext.Line(termtext.Head(fields[3], 4*maxTitle))
		if p.drawn {
			width, height := parseSize(fields[1]), parseSize(fields[2])
			if err := p.track.resize(width, height); err != nil {
				return err
			}
			continue
		}
		if err := c.capture(number, p); err != nil {
			return err
		}
	}
	for number, t := range c.rec.open { // also those of an earlier connection
		if !listed[number] {
			delete(c.panes, number)
			delete(c.rec.open, number)
			if err := t.close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// capture requests what a pane shows.
func (c *Control) capture(number int, p *pane) error {
	if p.asked {
		return nil
	}
	p.asked = true
	// Both commands see the pane in the same state.
	return c.send(fmt.Sprintf("display-message -p -t %%%d '%s' ; capture-pane -p -e -N -t %%%d", number, screenFormat, number),
		request{readScreen, number}, request{capture, number})
}

// resume continues a pane that tmux has paused because we were late. Its output since then is lost.
func (c *Control) resume(number int) error {
	if err := c.send(fmt.Sprintf("refresh-client -A '%%%d:continue'", number), request{kind: other}); err != nil {
		return err
	}
	p := c.panes[number]
	if p == nil {
		return nil
	}
	p.drawn = false
	return c.capture(number, p)
}

// output records output of a pane.
func (c *Control) output(number int, data []byte) error {
	p := c.panes[number]
	if p == nil {
		if len(c.panes) < maxPanes {
			return c.list()
		}
		return nil
	}
	if !p.drawn {
		return nil
	}
	if err := p.track.write(data); err != nil {
		return err
	}
	if p.track.full() || p.track.due() && !p.track.clean.holds() {
		return c.capture(number, p)
	}
	return nil
}

// parseOutput reads a notification of output, and undoes its escapes.
func parseOutput(line []byte) (number int, data []byte, ok bool) {
	kind, rest, _ := bytes.Cut(line, []byte(" "))
	id, data, ok := bytes.Cut(rest, []byte(" "))
	if !ok {
		return 0, nil, false
	}
	if string(kind) == "%extended-output" {
		if _, data, ok = bytes.Cut(data, []byte(": ")); !ok {
			return 0, nil, false
		}
	}
	number, ok = parsePane(string(id[:min(len(id), 20)]))
	return number, unescape(data), ok
}

// unescape replaces \ooo by the byte with that number.
func unescape(p []byte) []byte {
	out := make([]byte, 0, len(p))
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\\')
		if i < 0 {
			return append(out, p...)
		}
		out, p = append(out, p[:i]...), p[i:]
		if len(p) >= 4 {
			if n, err := strconv.ParseUint(string(p[1:4]), 8, 8); err == nil {
				out, p = append(out, byte(n)), p[4:]
				continue
			}
		}
		out, p = append(out, p[0]), p[1:]
	}
	return out
}

// parsePane reads the id of a pane, such as %12.
func parsePane(id string) (number int, ok bool) {
	digits, ok := strings.CutPrefix(strings.TrimSpace(id), "%")
	number, err := strconv.Atoi(digits)
	return number, ok && err == nil && number >= 0 && number < 1e9 && strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }) < 0
}

func parseSize(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 1
	}
	return min(max(n, 1), maxScreen)
}

// parseScreen reads a line of screenFormat. The width is 0 if it is invalid.
func parseScreen(lines [][]byte) (s screen) {
	if len(lines) == 0 {
		return s
	}
	fields := strings.Fields(string(lines[0][:min(len(lines[0]), 200)]))
	if len(fields) != 5 {
		return s
	}
	s.Width, s.Height = parseSize(fields[0]), parseSize(fields[1])
	x, errX := strconv.Atoi(fields[2])
	y, errY := strconv.Atoi(fields[3])
	if errX == nil && errY == nil {
		s.CursorX, s.CursorY = min(max(x, 0), s.Width-1), min(max(y, 0), s.Height-1)
	}
	s.Alternate = fields[4] == "1"
	return s
}

// Close ends all recordings.
func (c *Control) Close() error { return c.rec.Close() }
