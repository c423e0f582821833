// Package diagnose makes an archive for the report of a problem: texts of this host without the secrets
// that are known here or look like one.
package diagnose

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Limits of an archive.
const (
	MaxPart = 256 << 10 // bytes of a part; the end of a longer text is kept
	maxAll  = 8 << 20   // bytes of all parts
)

// marker replaces a secret, as in everything that a secret.Redactor writes.
const marker = "[redacted]"

// Part is a text of an archive.
type Part struct {
	Name     string `json:"name"`
	About    string `json:"about"`
	Bytes    int    `json:"bytes"`
	Redacted int    `json:"redacted"` // how often a secret was replaced
	text     string
}

// Collection collects the parts of an archive.
type Collection struct {
	Redact *secret.Redactor // knows the secrets of this host
	Home   string           // the user's home directory, which becomes "~"

	parts []Part
	size  int
}

// Add adds the end of a text, unless it is empty. An err that does not mean that there is no text is added
// in its place.
func (c *Collection) Add(name, about string, text []byte, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && len(text) == 0:
		return
	case err != nil:
		text = fmt.Appendf(text, "cannot be read: %v\n", err)
	}
	text = end(text, min(MaxPart, maxAll-c.size))
	c.size += len(text)
	c.parts = append(c.parts, Part{Name: name, About: about, text: string(text)})
}

// AddJSON adds a value as indented JSON.
func (c *Collection) AddJSON(name, about string, value any, err error) {
	text, jsonErr := json.MarshalIndent(value, "", "  ")
	if err != nil {
		text = nil
	}
	c.Add(name, about, append(text, '\n'), errors.Join(err, jsonErr))
}

// AddFile adds the end of a file, if it exists.
func (c *Collection) AddFile(name, about, path string) {
	text, err := readEnd(path)
	c.Add(name, about, text, err)
}

func readEnd(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, fs.ErrNotExist)
	}
	// One byte more shows that the text is longer.
	at := max(0, st.Size()-MaxPart-1)
	return io.ReadAll(io.NewSectionReader(f, at, MaxPart+1))
}

// end returns the last whole lines of a text, at most most bytes. The rest of a line could be the rest
// of a secret, which nothing recognizes.
func end(text []byte, most int) []byte {
	if len(text) <= most {
		return text
	}
	text = text[len(text)-max(most, 0):]
	_, text, _ = bytes.Cut(text, []byte("\n"))
	return text
}

// Bundle is a collection without secrets.
type Bundle struct{ Parts []Part }

// Finish removes secrets, the path of the home directory and characters that a terminal obeys.
func (c *Collection) Finish() (Bundle, error) {
	f, err := newFinder()
	if err != nil {
		return Bundle{}, err
	}
	var found []secret.Value
	for i := range c.parts {
		p := &c.parts[i]
		p.text = termtext.Lines(c.Redact.Redact(p.text))
		in, err := f.find(p.text)
		if err != nil {
			p.text = fmt.Sprintf("left out: %v\n", err)
		}
		found = append(found, in...)
	}
	c.Redact.Add(found...) // what is found in one part may be in others too
	home := homePath(c.Home)
	for i := range c.parts {
		p := &c.parts[i]
		p.text = home(hide(c.Redact, p.text))
		p.Bytes, p.Redacted = len(p.text), strings.Count(p.text, marker)
	}
	return Bundle{c.parts}, nil
}

// homePath returns a function that replaces the path of a home directory.
func homePath(home string) func(string) string {
	if len(home) < 2 { // none, or the root
		return func(text string) string { return text }
	}
	path := regexp.MustCompile(regexp.QuoteMeta(home) + `\b`)
	return func(text string) string { return path.ReplaceAllLiteralString(text, "~") }
}

// Exists returns the error for a file that exists already.
func Exists(path string) error {
	return fail.New(fail.Conflict, "%s already exists", path).WithHint("agent-sessionizer diagnose --output OTHER-FILE")
}

// WriteNew writes the archive, a gzipped tar file, to a file that must not exist. Its entries are below
// the directory dir.
func (b Bundle) WriteNew(path, dir string) error {
	archive, err := b.archive(dir)
	if err == nil {
		err = atomicfile.Create(path, archive, 0o600)
	}
	if errors.Is(err, fs.ErrExist) {
		return Exists(path)
	}
	if err != nil {
		return fail.New(fail.Host, "write the archive: %w", err)
	}
	return nil
}

func (b Bundle) archive(dir string) ([]byte, error) {
	var buf bytes.Buffer
	zip := gzip.NewWriter(&buf)
	out := tar.NewWriter(zip)
	for _, p := range b.Parts {
		h := tar.Header{Name: dir + "/" + p.Name, Mode: 0o600, Size: int64(len(p.text)), ModTime: time.Now(), Format: tar.FormatPAX}
		if err := out.WriteHeader(&h); err != nil {
			return nil, err
		}
		if _, err := io.WriteString(out, p.text); err != nil {
			return nil, err
		}
	}
	err := errors.Join(out.Close(), zip.Close())
	return buf.Bytes(), err
}
