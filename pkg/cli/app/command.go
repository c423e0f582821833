package app

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Version is set at build time.
var Version = "dev"

// RemoteExit is the exit status of a command that ran in a guest. It becomes this program's
// exit status unchanged.
type RemoteExit int

func (e RemoteExit) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// ChangedFlags returns the flags that were set on cmd, as arguments.
func ChangedFlags(cmd *cobra.Command) []string { return changedFlags(cmd, nil) }

func changedFlags(cmd *cobra.Command, but []string) []string {
	var args []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if slices.Contains(but, f.Name) {
			return
		}
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			switch f.NoOptDefVal {
			case "":
				args = append(args, "--"+f.Name, v)
			case v:
				args = append(args, "--"+f.Name)
			default:
				args = append(args, "--"+f.Name+"="+v)
			}
		}
	})
	return args
}

// Again returns a command line for a hint: the user's own command, without some of its flags, and with
// others added.
func Again(cmd *cobra.Command, without []string, add ...string) string {
	args := cmd.Flags().Args()
	if n := cmd.ArgsLenAtDash(); n >= 0 {
		args = slices.Concat(args[:n], []string{"--"}, args[n:])
	}
	return cmd.CommandPath() + " " + ssh.Quote(slices.Concat(changedFlags(cmd, without), add, args)...)
}

// ExclusiveFlags returns an error if flags are set of which only one can be. It replaces cobra's own
// error, which a user cannot read.
func ExclusiveFlags(cmd *cobra.Command) error {
	set := map[string][]string{} // by group
	cmd.Flags().Visit(func(f *pflag.Flag) {
		for _, group := range f.Annotations["cobra_annotation_mutually_exclusive"] {
			set[group] = append(set[group], "--"+f.Name)
		}
	})
	for _, group := range slices.Sorted(maps.Keys(set)) {
		if flags := set[group]; len(flags) > 1 {
			return fail.New(fail.Usage, "%s exclude each other", strings.Join(flags, " and ")).WithHint("%s --help", cmd.CommandPath())
		}
	}
	return nil
}

// Usage turns cobra's errors about arguments into usage errors.
func Usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return fail.New(fail.Usage, "%w", err).WithHint("%s --help", cmd.CommandPath())
		}
		return nil
	}
}

// QuietLog discards what a driver logs for a command that shows progress itself.
func QuietLog() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
