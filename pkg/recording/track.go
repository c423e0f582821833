package recording

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	minPart  = 128 << 10 // bytes of a part, with its text
	maxPart  = 4 << 20
	perLimit = 32  // parts within the limit of a session or task
	maxParts = 512 // of a session or task, however small they are

	maxEvent  = 32 << 10 // bytes of output in one event
	maxTitle  = 100
	maxScreen = 1000 // columns, and rows
	goneEvery = time.Second
)

// Recorder writes the recordings of one session or task. Only one goroutine may use it and
// its tracks.
type Recorder struct {
	Dir    string // Store.Subject
	Limit  int64  // of all its recordings on disk, approximately
	Redact *secret.Redactor

	open map[int]*track
	now  func() time.Time // nil for time.Now
}

func (r *Recorder) time() time.Time {
	if r.now != nil {
		return r.now()
	}
	return time.Now()
}

func (r *Recorder) partSize() int64 { return min(max(r.Limit/perLimit, minPart), maxPart) }

// track returns what records the terminal of that number.
func (r *Recorder) track(number int) *track {
	if r.open == nil {
		r.open = map[int]*track{}
	}
	t := r.open[number]
	if t == nil {
		t = &track{r: r, number: number}
		t.lines = newLines(t.writeLine)
		t.clean = newCleaner(r.Redact, t)
		r.open[number] = t
	}
	return t
}

// Close writes what is held back, and closes all files.
func (r *Recorder) Close() (err error) {
	for number, t := range r.open {
		err = errors.Join(err, t.close())
		delete(r.open, number)
	}
	return err
}

// makeRoom removes the oldest parts until another one fits. Parts that are being written stay.
func (r *Recorder) makeRoom() error {
	parts, err := listParts(r.Dir)
	if err != nil {
		return err
	}
	slices.SortStableFunc(parts, func(a, b part) int { return a.changed.Compare(b.changed) })
	size := r.partSize()
	for _, p := range parts {
		size += max(p.size, 4<<10) // what a small file takes on the disk
	}
	left := len(parts)
	for _, p := range parts {
		if size <= r.Limit && left < maxParts {
			return nil
		}
		if t := r.open[p.number]; t != nil && t.cast != nil && t.part.serial == p.serial {
			continue
		}
		if err := p.remove(); err != nil {
			return err
		}
		size -= max(p.size, 4<<10)
		left--
	}
	return nil
}

// screen is what a terminal shows.
type screen struct {
	Width, Height    int
	CursorX, CursorY int
	Alternate        bool // the screen of full-screen programs
	Title            string
	Lines            [][]byte
}

// output returns what a program would print to draw the screen.
func (s screen) output() []byte {
	var b []byte
	if s.Alternate {
		b = append(b, "\x1b[?1049h"...)
	}
	b = append(b, "\x1b[0m\x1b[H\x1b[2J"...)
	for i, line := range s.Lines {
		if i > 0 {
			b = append(b, "\r\n"...)
		}
		b = append(b, line...)
	}
	return append(b, fmt.Sprintf("\x1b[0m\x1b[%d;%dH", s.CursorY+1, s.CursorX+1)...)
}

// track records one terminal.
type track struct {
	r      *Recorder
	number int
	title  string
	width  int
	height int

	clean *cleaner
	lines *lines

	part   part
	cast   *os.File // nil if no part is open
	texts  *os.File
	began  time.Time // the header's timestamp
	size   int64     // of cast and texts
	looked time.Time // when the files were last seen at their path
	out    []byte    // cleaned output that is not written yet
	news   []byte    // lines of text that are not written yet
	quiet  bool      // the text of the output is in an earlier part
}

// due reports whether the next part should begin.
func (t *track) due() bool {
	return t.cast == nil || t.size >= t.r.partSize()
}

// full reports whether the part takes no more output.
func (t *track) full() bool { return t.cast == nil || t.size >= 2*t.r.partSize() }

// draw records what the terminal shows, at the start of a new part if one is due. What the cleaner holds
// back is on the screen, too.
func (t *track) draw(s screen) error {
	t.clean = newCleaner(t.r.Redact, t)
	return t.show(s)
}

// clear does so while the cleaner holds back what may begin a secret. The recording shows an empty screen then,
// because the screen has the same text; the output that follows tells whether it is a secret.
func (t *track) clear(s screen) error {
	s.Lines = nil
	return t.show(s)
}

// show records a screen, at the start of a new part if one is due.
func (t *track) show(s screen) error {
	first := t.cast == nil && t.part.serial == 0
	t.title, t.width, t.height = s.Title, min(max(s.Width, 1), maxScreen), min(max(s.Height, 1), maxScreen)
	begins := t.due()
	if begins {
		if err := t.begin(); err != nil {
			return err
		}
	}
	t.quiet = begins && !first
	defer func() { t.quiet = false }()
	c := newCleaner(t.r.Redact, t)
	if _, err := c.Write(s.output()); err != nil {
		return err
	}
	if err := c.Close(); err != nil {
		return err
	}
	t.lines.end()
	return t.flush()
}

// write records output. It drops what a full part cannot take, but looks for secrets in it, too: their rest may
// follow.
func (t *track) write(p []byte) error {
	full := t.full()
	if _, err := t.clean.Write(p); err != nil {
		return err
	}
	if full {
		t.out, t.news = nil, nil
		return nil
	}
	return t.flush()
}

// resize records a new size of the terminal.
func (t *track) resize(width, height int) error {
	width, height = min(max(width, 1), maxScreen), min(max(height, 1), maxScreen)
	if t.cast == nil || width == t.width && height == t.height {
		return nil
	}
	t.width, t.height = width, height
	return t.append(appendEvent(nil, Event{t.elapsed(), Resize, fmt.Sprintf("%dx%d", width, height)}))
}

// close ends the current part. It drops what is held back: the rest of a secret may never arrive.
func (t *track) close() error {
	t.clean = newCleaner(t.r.Redact, t)
	t.lines.end()
	return errors.Join(t.flush(), t.closeFiles())
}

func (t *track) closeFiles() (err error) {
	for _, f := range []**os.File{&t.cast, &t.texts} {
		if *f != nil {
			err = errors.Join(err, (*f).Close())
			*f = nil
		}
	}
	return err
}

// begin opens the next part.
func (t *track) begin() error {
	if err := t.closeFiles(); err != nil {
		return err
	}
	if err := os.MkdirAll(t.r.Dir, 0o700); err != nil {
		return fail.New(fail.Host, "create directory of recordings: %w", err)
	}
	if err := t.r.makeRoom(); err != nil {
		return err
	}
	serial, err := t.nextSerial()
	if err != nil {
		return err
	}
	p := part{dir: t.r.Dir, number: t.number, serial: serial}
	open := func(name string) (*os.File, error) {
		crash.Here(crash.BeforeFile)
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
		crash.Here(crash.AfterFile)
		if err != nil {
			return nil, fail.New(fail.Host, "create recording: %w", err)
		}
		return f, nil
	}
	// A text without a recording, left by a killed process, has this name too.
	if err := os.Remove(p.text()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.Host, "create recording: %w", err)
	}
	if t.cast, err = open(p.cast()); err != nil {
		return err
	}
	if t.texts, err = open(p.text()); err != nil {
		return errors.Join(err, t.closeFiles())
	}
	now := t.r.time()
	t.part, t.began, t.size, t.looked = p, now.Truncate(time.Second), 0, now
	line, err := json.Marshal(header{2, t.width, t.height, t.began.Unix(), t.r.Redact.Line(t.title, maxTitle)})
	if err != nil {
		return err
	}
	return t.append(append(line, '\n'))
}

// nextSerial returns the number of the track's next part.
func (t *track) nextSerial() (int, error) {
	if t.part.serial > 0 {
		return t.part.serial + 1, nil
	}
	parts, err := listParts(t.r.Dir)
	if err != nil {
		return 0, err
	}
	last := 0
	for _, p := range parts {
		if p.number == t.number {
			last = max(last, p.serial)
		}
	}
	return last + 1, nil
}

func (t *track) text(p []byte) {
	t.out = append(t.out, p...)
	if !t.quiet {
		t.lines.text(p)
	}
}

func (t *track) control(p []byte) {
	t.out = append(t.out, p...)
	if !t.quiet {
		t.lines.control(p)
	}
}

// writeLine takes a line of text for the search. Moves of the cursor may have joined a secret in it.
func (t *track) writeLine(line string) {
	t.news = strconv.AppendInt(t.news, t.elapsed().Milliseconds(), 10)
	t.news = append(t.news, '\t')
	t.news = append(t.news, termtext.Line(t.r.Redact.Redact(line))...)
	t.news = append(t.news, '\n')
}

func (t *track) elapsed() time.Duration { return max(t.r.time().Sub(t.began), 0) }

// flush writes output and text to the files. A character that is not complete waits for its rest.
func (t *track) flush() error {
	if t.cast == nil {
		t.out, t.news = nil, nil
		return nil
	}
	if err := t.checkFiles(); err != nil || t.cast == nil {
		return err
	}
	var lines []byte
	for len(t.out) > 0 {
		n := completeLength(t.out[:min(len(t.out), maxEvent)])
		if n == 0 {
			break
		}
		lines = appendEvent(lines, Event{t.elapsed(), Output, string(t.out[:n])})
		t.out = t.out[n:]
	}
	t.out = append([]byte(nil), t.out...)
	if err := t.append(lines); err != nil {
		return err
	}
	news := t.news
	t.news = nil
	if len(news) == 0 {
		return nil
	}
	t.size += int64(len(news))
	crash.Here(crash.BeforeFile)
	_, err := t.texts.Write(news)
	crash.Here(crash.AfterFile)
	if err != nil {
		return fail.New(fail.Host, "write recording: %w", err)
	}
	return nil
}

// completeLength returns the length of p without a character that is not complete.
func completeLength(p []byte) int {
	for i := len(p) - 1; i >= max(0, len(p)-utf8.UTFMax); i-- {
		if utf8.RuneStart(p[i]) {
			if !utf8.FullRune(p[i:]) {
				return i
			}
			break
		}
	}
	return len(p)
}

// append writes lines to the part.
func (t *track) append(lines []byte) error {
	if len(lines) == 0 {
		return nil
	}
	t.size += int64(len(lines))
	crash.Here(crash.BeforeFile)
	_, err := t.cast.Write(lines)
	crash.Here(crash.AfterFile)
	if err != nil {
		return fail.New(fail.Host, "write recording: %w", err)
	}
	return nil
}

// checkFiles closes the part if a user has removed its files.
func (t *track) checkFiles() error {
	if now := t.r.time(); now.Sub(t.looked) >= goneEvery {
		t.looked = now
		if _, err := os.Lstat(t.part.cast()); errors.Is(err, fs.ErrNotExist) {
			t.out, t.news = nil, nil
			return t.closeFiles()
		}
	}
	return nil
}

// Log records the output of a program that has no terminal of its own.
type Log struct {
	r *Recorder
	t *track
}

// The size of the terminal on which a Log is shown.
const logWidth, logHeight = 120, 40

// NewLog returns the log of that number and title.
func NewLog(r *Recorder, number int, title string) *Log {
	t := r.track(number)
	t.title, t.width, t.height = title, logWidth, logHeight
	return &Log{r, t}
}

// Write records output, whose lines end with a newline.
func (l *Log) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := min(len(rest), maxEvent)
		if l.t.due() {
			if err := l.t.begin(); err != nil {
				return 0, err
			}
		}
		if err := l.t.write([]byte(strings.ReplaceAll(string(rest[:n]), "\n", "\r\n"))); err != nil {
			return 0, err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// Close ends the recording.
func (l *Log) Close() error { return errors.Join(l.t.clean.Close(), l.r.Close()) }
