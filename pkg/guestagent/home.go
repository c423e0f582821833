package guestagent

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
)

// shippedDotfiles holds the files that the provision scripts last put into the home
// directory, under the same names.
const shippedDotfiles = "/var/lib/agent-sessionizer/dotfiles"

// Home works on the home directory of the user that runs it, which is the agent. It
// installs dotfiles, writes a saved home, and restores one. It reports each file
// that it leaves out as a line on errs.
func (g Guest) Home(args []string, in io.Reader, out, errs io.Writer) error {
	flags := flag.NewFlagSet("home", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	first := flags.Bool("first", false, "")
	not := flags.String("not", "", "")
	limit := flags.Int64("max", 0, "")
	verb := ""
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	if err := flags.Parse(args); err != nil {
		return fail.New(fail.Usage, "home: %w\n%s", err, usage)
	}
	dir, err := os.UserHomeDir()
	if err != nil {
		return fail.New(fail.Host, "home: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fail.New(fail.Host, "home: %w", err)
	}
	defer root.Close()
	var left []homearchive.Left
	switch verb {
	case "bring":
		left, err = homearchive.Bring(root, in, homearchive.BringOptions{First: *first, Shipped: g.shipped})
	case "restore":
		left, err = homearchive.Restore(root, in, homearchive.RestoreOptions{First: *first, Patterns: flags.Args(), Not: *not, Bounds: homearchive.SaveBounds(*limit)})
	case "save":
		brought := homearchive.Brought(root)
		left, err = homearchive.Save(out, root, homearchive.SaveOptions{
			Patterns: flags.Args(), Not: *not, Bounds: homearchive.SaveBounds(*limit),
			Ours: func(name string, mode fs.FileMode, content []byte) bool {
				return brought(name, mode, content) || g.shipped(name, content)
			},
		})
	default:
		return fail.New(fail.Usage, "home: verb must be bring, save or restore\n%s", usage)
	}
	for _, l := range left {
		fmt.Fprintln(errs, guestproto.Clean(l.String()))
	}
	if err != nil {
		return fail.New(fail.Failure, "home %s: %w", verb, err)
	}
	return nil
}

// shipped reports whether a file of the home directory is unchanged since
// provisioning.
func (g Guest) shipped(name string, content []byte) bool {
	text, err := os.ReadFile(filepath.Join(g.path(shippedDotfiles), name))
	return err == nil && bytes.Equal(text, content)
}
