package screen

import (
	"archive/zip"
	"bytes"
	"context"
	_ "embed" // the definitions of languages
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/alecthomas/chroma/v2"
)

// languages has chroma's definitions of the languages in common use. All that chroma has would add
// three more megabytes to the program. TestLanguages writes it:
//
//go:generate go test -run TestLanguages -update .
//go:embed languages.zip
var languages []byte

// lexers returns the known languages.
var lexers = sync.OnceValue(func() *chroma.LexerRegistry {
	all := chroma.NewLexerRegistry()
	archive, err := zip.NewReader(bytes.NewReader(languages), int64(len(languages)))
	if err != nil {
		panic(err) // it is part of the program
	}
	names, _ := fs.Glob(archive, "*.xml")
	for _, name := range names {
		all.Register(chroma.MustNewXMLLexer(archive, name))
	}
	return all
})

// Limits of what is coloured of a file. The agent chooses the text, and a lexer can be slow.
const (
	maxColoured = 512 << 10 // bytes
	maxName     = 255       // bytes of its name, as file systems have it; finding a language for a longer one is slow
	colourTime  = time.Second
)

// colour is the meaning of a piece of a program's text.
type colour byte

const (
	noColour colour = iota
	commentColour
	keywordColour
	literalColour
	numberColour
	nameColour
)

var palette = map[colour]lipgloss.Style{
	commentColour: normal.Foreground(lipgloss.BrightBlack),
	keywordColour: normal.Foreground(lipgloss.Magenta),
	literalColour: normal.Foreground(lipgloss.Yellow),
	numberColour:  normal.Foreground(lipgloss.Cyan),
	nameColour:    normal.Foreground(lipgloss.Blue),
}

func colourOf(t chroma.TokenType) colour {
	switch {
	case t.InCategory(chroma.Comment):
		return commentColour
	case t.InCategory(chroma.Keyword):
		return keywordColour
	case t.InSubCategory(chroma.LiteralString):
		return literalColour
	case t.InSubCategory(chroma.LiteralNumber):
		return numberColour
	case t == chroma.NameFunction, t == chroma.NameClass, t == chroma.NameTag:
		return nameColour
	}
	return noColour
}

// colourer colours the hunks of one file.
type colourer struct {
	ctx   context.Context
	lexer chroma.Lexer
	bytes int
	until time.Time
}

// newColourer returns nil if the file's name suggests no language.
func newColourer(ctx context.Context, file string) *colourer {
	base := path.Base(file)
	if len(base) > maxName {
		return nil
	}
	lexer := lexers().Match(base)
	if lexer == nil {
		return nil
	}
	return &colourer{ctx: ctx, lexer: chroma.Coalesce(lexer), until: time.Now().Add(colourTime)}
}

// colours returns the colour of each byte of lines, or nil if there is none. Without a colourer
// nothing has a colour.
func (c *colourer) colours(lines []string) (all [][]colour) {
	if c == nil || c.ctx.Err() != nil || time.Now().After(c.until) {
		return nil
	}
	text := strings.Join(lines, "\n") + "\n"
	if c.bytes += len(text); c.bytes > maxColoured {
		return nil
	}
	defer func() {
		if recover() != nil { // chroma panics if a definition lacks something
			all = nil
		}
	}()
	next, err := c.lexer.Tokenise(nil, text)
	if err != nil {
		return nil
	}
	flat := make([]colour, 0, len(text))
	for token := next(); token != chroma.EOF; token = next() {
		flat = append(flat, slices.Repeat([]colour{colourOf(token.Type)}, len(token.Value))...)
		if c.ctx.Err() != nil || time.Now().After(c.until) || len(flat) > len(text) {
			return nil
		}
	}
	if len(flat) != len(text) { // the lexer has changed the text
		return nil
	}
	for _, l := range lines {
		all, flat = append(all, flat[:len(l)]), flat[len(l)+1:]
	}
	return all
}
