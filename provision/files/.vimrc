syntax on
filetype plugin indent on
set number incsearch hlsearch ignorecase smartcase hidden autoread termguicolors
set noswapfile undofile undodir=~/.local/state/vim//
silent! call mkdir(expand('~/.local/state/vim'), 'p', 0700)
let g:netrw_banner = 0
