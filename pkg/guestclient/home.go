package guestclient

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// BringDotfiles unpacks an archive of homearchive.Dotfiles in the agent's home directory,
// as the agent. With first, the dotfiles replace existing files; otherwise files that
// were changed in the guest stay. notes lists what was not brought.
func (g Guest) BringDotfiles(ctx context.Context, archive io.Reader, first bool) (notes []string, err error) {
	return g.home(ctx, archive, nil, "bring", "--first="+strconv.FormatBool(first))
}

// SavePatterns defines the saved home: which files of the agent's home directory are saved.
type SavePatterns struct {
	Patterns homearchive.Patterns
	Not      string // an entry of the home directory to leave out: the checkout
	Max      int64  // bytes
}

func (k SavePatterns) args(verb string, more ...string) []string {
	args := append([]string{verb, "--not=" + k.Not, "--max=" + strconv.FormatInt(k.Max, 10)}, more...)
	return append(append(args, "--"), k.Patterns...)
}

// SaveHome writes an archive of the files that k defines to w. The guest makes the
// archive. After an error, the output may be cut off at any point. notes lists what was
// left out.
func (g Guest) SaveHome(ctx context.Context, k SavePatterns, w io.Writer) (notes []string, err error) {
	return g.home(ctx, nil, w, k.args("save")...)
}

// RestoreHome unpacks the files of an archive by SaveHome that k defines. With first,
// they replace existing files; otherwise only missing files are restored.
func (g Guest) RestoreHome(ctx context.Context, k SavePatterns, archive io.Reader, first bool) (notes []string, err error) {
	return g.home(ctx, archive, nil, k.args("restore", "--first="+strconv.FormatBool(first))...)
}

// manyNotes limits how many notes a guest may send.
const manyNotes = 25

func (g Guest) home(ctx context.Context, in io.Reader, out io.Writer, args ...string) (notes []string, err error) {
	lines := &progress{report: func(line string) {
		if len(notes) < manyNotes {
			notes = append(notes, line)
		}
	}}
	err = g.SSH.Run(ctx, g.program(append([]string{"home"}, args...)...), ssh.IO{Stdin: in, Stdout: out, Stderr: lines})
	lines.end()
	if err != nil {
		if len(lines.tail) > 0 {
			err = fmt.Errorf("%w: %s", err, lines.tail[len(lines.tail)-1])
		}
		return nil, err
	}
	return notes, nil
}
