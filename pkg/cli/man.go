package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Manual pages are generated from the help of the commands, so that the two agree. cobra's
// own generator goes through Markdown, which would add two parsers to the program.

func newManCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "man [DIR]", Short: "Print the manual page, or write all pages to a directory",
		Example: `  agent-sessionizer man | man -l -
  agent-sessionizer man ~/.local/share/man/man1`,
		Args: app.Usage(cobra.MaximumNArgs(1)),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				a.Printf("%s", manPage(cmd.Root()))
				return nil
			}
			return writeManPages(cmd.Root(), args[0])
		},
	}
}

func writeManPages(root *cobra.Command, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail.New(fail.Host, "create directory: %w", err)
	}
	for _, cmd := range visible(root) {
		if err := os.WriteFile(filepath.Join(dir, manName(cmd)+".1"), []byte(manPage(cmd)), 0o644); err != nil {
			return fail.New(fail.Host, "write manual page: %w", err)
		}
	}
	return nil
}

// visible returns a command and all its subcommands that help shows.
func visible(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "help" {
			all = append(all, visible(sub)...)
		}
	}
	return all
}

func manName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manPage returns the page of one command, in man(7) format.
func manPage(cmd *cobra.Command) string {
	var p page
	p.line(`.TH "%s" 1 "%s" "agent-sessionizer %s" "agent-sessionizer"`, roff(strings.ToUpper(manName(cmd))), manDate().Format("2006-01-02"), roff(app.Version))
	p.section("NAME")
	p.line(`%s \- %s`, roff(manName(cmd)), roff(cmd.Short))
	p.section("SYNOPSIS")
	_, args, _ := strings.Cut(cmd.Use, " ")
	p.line(`\fB%s\fR`, roff(cmd.CommandPath()))
	if options := localFlags(cmd); len(options) > 0 {
		p.line(`[\fIoptions\fR]`)
	}
	if args != "" {
		p.text(args)
	}
	if cmd.HasAvailableSubCommands() {
		p.line(".br")
		p.line(`\fB%s\fR \fIcommand\fR`, roff(cmd.CommandPath()))
	}
	p.section("DESCRIPTION")
	long := cmd.Long
	if long == "" {
		long = cmd.Short + "."
	}
	p.prose(long)
	if len(cmd.Aliases) > 0 {
		p.line(".PP")
		p.text("Aliases: " + strings.Join(cmd.Aliases, ", ") + ".")
	}
	p.commands(cmd)
	if options := localFlags(cmd); len(options) > 0 {
		p.section("OPTIONS")
		for _, f := range options {
			p.option(f)
		}
	}
	if cmd.Example != "" {
		p.section("EXAMPLES")
		p.line(".EX")
		for line := range strings.Lines(cmd.Example) {
			p.text(strings.TrimPrefix(strings.TrimRight(line, "\n"), "  "))
		}
		p.line(".EE")
	}
	if !cmd.HasParent() {
		p.entries("EXIT STATUS", exitCodes())
		p.line(".PP")
		p.text("exec and ssh return the exit status of the guest's command, or 128 plus the signal that ended it.")
		p.entries("ENVIRONMENT", environment())
		p.entries("FILES", files)
	}
	p.seeAlso(cmd)
	return p.String()
}

// page builds a text in man(7) format.
type page struct{ strings.Builder }

func (p *page) line(format string, args ...any) { fmt.Fprintf(&p.Builder, format+"\n", args...) }

func (p *page) section(name string) { p.line(".SH %s", name) }

// text writes a line of text, and escapes a leading control character.
func (p *page) text(s string) {
	s = roff(s)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		s = `\&` + s
	}
	p.line("%s", s)
}

// prose writes text in the style of help: paragraphs, lists with dashes, and indented
// lines, which are kept unchanged.
func (p *page) prose(s string) {
	for n, par := range strings.Split(strings.TrimSpace(s), "\n\n") {
		lines := strings.Split(par, "\n")
		switch {
		case strings.HasPrefix(lines[0], "  - "):
			for _, line := range lines {
				item, begins := strings.CutPrefix(line, "  - ")
				if begins {
					p.line(`.IP \(bu 2`)
				}
				p.text(strings.TrimSpace(item))
			}
			continue
		case strings.HasPrefix(lines[0], "  "):
			p.line(".PP")
			p.line(".EX")
			for _, line := range lines {
				p.text(line)
			}
			p.line(".EE")
			continue
		case n > 0:
			p.line(".PP")
		}
		for _, line := range lines {
			p.text(line)
		}
	}
}

// commands writes the subcommands of cmd by group.
func (p *page) commands(cmd *cobra.Command) {
	if !cmd.HasAvailableSubCommands() {
		return
	}
	p.section("COMMANDS")
	groups := append([]*cobra.Group{{}}, cmd.Groups()...)
	for _, g := range groups {
		first := true
		for _, sub := range cmd.Commands() {
			if !sub.IsAvailableCommand() || sub.Name() == "help" || sub.GroupID != g.ID {
				continue
			}
			if first && g.Title != "" {
				p.line(`.SS "%s"`, roff(strings.TrimSuffix(g.Title, ":")))
			}
			first = false
			p.line(".TP")
			p.line(`\fB%s\fR(1)`, roff(manName(sub)))
			p.text(sub.Short)
		}
	}
}

func localFlags(cmd *cobra.Command) (flags []*pflag.Flag) {
	cmd.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			flags = append(flags, f)
		}
	})
	return flags
}

func (p *page) option(f *pflag.Flag) {
	value, usage := pflag.UnquoteUsage(f)
	name := `\fB` + roff("--"+f.Name) + `\fR`
	if f.Shorthand != "" {
		name = `\fB` + roff("-"+f.Shorthand) + `\fR, ` + name
	}
	if value != "" {
		name += ` \fI` + roff(value) + `\fR`
	}
	p.line(".TP")
	p.line("%s", name)
	p.text(usage)
}

func (p *page) entries(section string, all []entry) {
	p.section(section)
	for _, e := range all {
		p.line(".TP")
		p.line(`\fB%s\fR`, roff(e.name))
		p.text(e.text)
	}
}

func (p *page) seeAlso(cmd *cobra.Command) {
	var names []string
	if cmd.HasParent() {
		names = append(names, manName(cmd.Parent()))
		for _, sister := range cmd.Parent().Commands() {
			if sister != cmd && sister.IsAvailableCommand() && sister.Name() != "help" && cmd.Parent().HasParent() {
				names = append(names, manName(sister))
			}
		}
	} else {
		names = []string{"git", "ssh", "tmux"}
	}
	slices.Sort(names)
	p.section("SEE ALSO")
	for i, name := range names {
		end := ","
		if i == len(names)-1 {
			end = ""
		}
		p.line(`\fB%s\fR(1)%s`, roff(name), end)
	}
}

// roff escapes text for man(7). Every hyphen becomes one that survives copying, because it
// may be part of a command.
func roff(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\\':
			b.WriteString(`\e`)
		case r == '-':
			b.WriteString(`\-`)
		case r == '"':
			b.WriteString(`\(dq`)
		case r > '~':
			fmt.Fprintf(&b, `\[u%04X]`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// manDate returns the date of the source revision, so that the same source produces the
// same pages.
func manDate() time.Time {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if at, err := time.Parse(time.RFC3339, s.Value); s.Key == "vcs.time" && err == nil {
				return at
			}
		}
	}
	return time.Now()
}
